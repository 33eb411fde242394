/* NIXL's calls: no exception leaves them, and only the constructor and registerMem() of a file may wait for anything. */
#include "engine.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <unistd.h>

using nixl::Memory;
using nixl::Status;

/* Batches of objects have many blocks in flight each; these let some batches, and the parts of a batch of files, run side by side. */
static constexpr unsigned WORKERS = 4;

struct Handle : nixl::Request {
    std::shared_ptr<Transfer> transfer;
};

/* A client is wanted, by one who cannot wait for it. */
struct Reconnect : Work {
    std::shared_ptr<Pool> pool;

    void run(uint32_t, uint32_t) noexcept override {
        try {
            pool->connected();
        } catch (...) { /* no memory: the next one tries again */
        }
    }
};

template <class Call> static Status guarded(const Call &call) noexcept {
    try {
        return call();
    } catch (const std::exception &error) {
        say("%s", error.what());
        return Status::backend;
    }
}

Engine::Engine(const nixl::InitParameters &init) noexcept : nixl::Engine(init), pid_(getpid()) {
    Status status = guarded([&] {
        Settings settings;
        std::string wrong = settings.read(*init.custom);
        if (!wrong.empty()) {
            say("%s", wrong.c_str());
            return Status::invalid_parameter;
        }
        pool_ = std::make_shared<Pool>(settings);
        paths_ = std::make_unique<Paths>(settings.mount);
        workers_ = std::make_unique<Workers>(WORKERS);
        pool_->connected(); /* kvfs may come later */
        return Status::success;
    });
    init_failed = status != Status::success;
}

bool Engine::is_child() const { return getpid() != pid_; }

Engine::~Engine() {
    if (is_child()) /* of fork(): the threads are not here, and what they held may be half-way */
        (void)workers_.release();
}

/* ---- registrations ---- */

Status Engine::registerMem(const nixl::Registration &registration, const Memory &memory, nixl::Metadata *&out) {
    return guarded([&] {
        out = nullptr;
        if (memory == Memory::dram)
            return Status::success;
        if (memory != Memory::object && memory != Memory::file) {
            say("memory of type %u: DRAM, objects and files are possible; GPU memory is not", (unsigned)memory);
            return Status::not_supported;
        }
        auto target = std::make_unique<Target>();
        target->memory = memory;
        target->device = registration.device;
        Status status = memory == Memory::object ? register_object(registration, *target) : register_file(registration, *target);
        if (status == Status::success)
            out = target.release();
        return status;
    });
}

Status Engine::register_object(const nixl::Registration &registration, Target &target) {
    target.key = registration.meta.empty() ? std::to_string(registration.device) : registration.meta;
    if (!key_fits(target.key)) {
        say("a key of %zu bytes: 1 to %d are possible", target.key.size(), KVFS_KEY_MAX);
        return Status::invalid_parameter;
    }
    return keep_device(target);
}

Status Engine::register_file(const nixl::Registration &registration, Target &target) {
    auto mode = PathMode::read(registration.meta);
    int fd = (int)registration.device;
    if (mode) {
        fd = mode->open(pool_->mount());
        if (fd == -EXDEV) {
            say("%s: not on the mount of %s", mode->path.c_str(), pool_->mount().c_str());
            return Status::invalid_parameter;
        }
        if (fd < 0) {
            if (fd != -ENOENT)
                say("%s: %s", mode->path.c_str(), strerror(-fd));
            return status_of(fd);
        }
        target.key = mode->path;
    }
    target.file = std::make_shared<File>(fd, mode.has_value());
    Status status = target.file->check(pool_->mount());
    return status == Status::success && mode ? keep_device(target) : status;
}

Status Engine::keep_device(Target &target) {
    std::lock_guard<std::mutex> guard(lock_);
    auto &[name, count] = devices_[{target.memory, target.device}];
    if (count && name != target.key) {
        say("device %llu is registered already, for another %s", (unsigned long long)target.device, target.memory == Memory::file ? "path" : "key");
        return Status::not_allowed;
    }
    name = target.key;
    count++;
    target.keeps_device = true;
    return Status::success;
}

Status Engine::deregisterMem(nixl::Metadata *metadata) {
    return guarded([&] {
        std::unique_ptr<Target> target(static_cast<Target *>(metadata));
        if (!target || !target->keeps_device)
            return Status::success;
        std::lock_guard<std::mutex> guard(lock_);
        auto found = devices_.find({target->memory, target->device});
        if (found != devices_.end() && --found->second.second == 0)
            devices_.erase(found);
        return Status::success;
    });
}

Status Engine::loadLocalMD(nixl::Metadata *in, nixl::Metadata *&out) {
    out = in;
    return Status::success;
}

/* ---- transfers ---- */

Status Engine::prepXfer(const nixl::Operation &operation, const nixl::List<nixl::Part> &local, const nixl::List<nixl::Part> &remote,
                        const std::string &to, nixl::Request *&request, const nixl::Options *) const {
    return guarded([&] {
        if (local.type() != Memory::dram || (remote.type() != Memory::object && remote.type() != Memory::file) || to != agent) {
            say("a transfer is between DRAM, as local, and objects or files of the same agent, as remote");
            return Status::invalid_parameter;
        }
        if (local.all().size() != remote.all().size() || local.all().empty())
            return Status::invalid_parameter;
        for (size_t i = 0; i < local.all().size(); i++)
            if (local.all()[i].size != remote.all()[i].size)
                return Status::invalid_parameter;
        auto handle = std::make_unique<Handle>();
        handle->transfer = std::make_shared<Transfer>(*pool_, operation);
        Status status = handle->transfer->prepare(local.all(), remote.all(), remote.type());
        if (status == Status::success)
            request = handle.release();
        return status;
    });
}

/* The lists are those of prepXfer(), which has read them. */
Status Engine::postXfer(const nixl::Operation &, const nixl::List<nixl::Part> &, const nixl::List<nixl::Part> &, const std::string &,
                        nixl::Request *&request, const nixl::Options *) const {
    return guarded([&] {
        if (is_child()) {
            say("this back end was made by process %d; after fork() make a new one", pid_);
            return Status::backend;
        }
        const auto &transfer = static_cast<Handle *>(request)->transfer;
        if (transfer->status() == Status::in_progress)
            return Status::repost_active;
        uint32_t slices = transfer->slices(workers_->count());
        transfer->begin(slices);
        try {
            workers_->post(transfer, slices);
        } catch (...) {
            transfer->withdrawn(slices);
            throw;
        }
        return Status::in_progress;
    });
}

Status Engine::checkXfer(nixl::Request *request) const {
    return guarded([&] { return static_cast<Handle *>(request)->transfer->status(); });
}

/* Until no thread and no device can touch the caller's memory, the answer is that it goes on; it was canceled then, and NIXL asks again. */
Status Engine::releaseReqH(nixl::Request *request) const {
    return guarded([&] {
        std::unique_ptr<Handle> handle(static_cast<Handle *>(request));
        const auto &transfer = handle->transfer;
        if (!is_child() && transfer->status() == Status::in_progress) {
            transfer->cancel();
            transfer->withdrawn(workers_->withdraw(transfer));
            if (transfer->status() == Status::in_progress) {
                (void)handle.release();
                return Status::repost_active;
            }
        }
        return Status::success;
    });
}

/* ---- what is there ---- */

Status Engine::queryMem(const nixl::List<nixl::Registration> &list, std::vector<nixl::Answer> &answers) const {
    return guarded([&] {
        const auto &asked = list.all();
        answers.assign(asked.size(), std::nullopt);
        if (list.type() == Memory::file) {
            Client client = pool_->there();
            for (size_t i = 0; i < asked.size(); i++) {
                auto mode = PathMode::read(asked[i].meta);
                answers[i] = paths_->query(client, mode ? mode->path : asked[i].meta);
            }
            return Status::success;
        }
        if (list.type() != Memory::object)
            return Status::not_supported;
        std::vector<std::string> keys;
        for (const nixl::Registration &one : asked)
            keys.push_back(one.meta.empty() ? std::to_string(one.device) : one.meta);
        std::vector<int64_t> sizes;
        if (!pool_->sizes(keys, sizes)) { /* nobody can say: a miss, which a load of it would be as well */
            if (!is_child() && !pool_->there()) {
                auto wanted = std::make_shared<Reconnect>();
                wanted->pool = pool_;
                workers_->post(wanted, 1);
            }
            return Status::success;
        }
        for (size_t i = 0; i < keys.size(); i++)
            if (sizes[i] >= 0)
                answers[i] = nixl::Parameters{{"size", std::to_string(sizes[i])}};
        return Status::success;
    });
}
