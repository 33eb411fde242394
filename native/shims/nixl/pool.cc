/* Settings, the client, and batches of objects: everything that libkvfs is asked. */
#include "pool.h"

#include <cerrno>
#include <cinttypes>
#include <cstdarg>
#include <cstdio>
#include <cstring>

using nixl::Status;
using std::chrono::seconds;
using std::chrono::steady_clock;

void say(const char *format, ...) {
    static constexpr unsigned BURST = 16;
    static std::mutex lock;
    static steady_clock::time_point since;
    static unsigned left = BURST, left_out;
    char text[768];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    std::lock_guard<std::mutex> guard(lock);
    if (left < BURST && steady_clock::now() >= since + seconds(1)) {
        left = left ? BURST : 1;
        since = steady_clock::now();
    }
    if (!left) {
        left_out++;
        return;
    }
    if (left-- == BURST)
        since = steady_clock::now();
    if (left_out)
        fprintf(stderr, "kvfs: NIXL plugin: %s (%u lines before this one were left out)\n", text, left_out);
    else
        fprintf(stderr, "kvfs: NIXL plugin: %s\n", text);
    left_out = 0;
}

/* ---- settings ---- */

nixl::Parameters Settings::defaults() { return {{"mount", ""}, {"namespace", ""}, {"revision", ""}, {"timeout_ms", ""}, {"depth", ""}}; }

/* Empty, or what is wrong. */
static std::string number(const std::string &name, const std::string &text, uint32_t most, uint32_t *out) {
    uint64_t value = 0;
    bool digits = !text.empty() && text.size() <= 9 && text.find_first_not_of("0123456789") == std::string::npos;
    for (size_t i = 0; digits && i < text.size(); i++)
        value = value * 10 + (uint64_t)(text[i] - '0');
    if (!digits || value < 1 || value > most)
        return name + " is '" + text.substr(0, 32) + "': 1 to " + std::to_string(most) + " are possible";
    *out = (uint32_t)value;
    return "";
}

/* A component of the namespace, as connectors have it: kvfs/connectors/common.py. They change a revision that is no name, and here it is refused. */
static std::string revised(const std::string &space, const std::string &revision) {
    return space + (space.empty() || space.back() == '/' ? "@" : "/@") + revision;
}

std::string Settings::read(const nixl::Parameters &parameters) {
    std::string revision;
    for (const auto &[name, text] : parameters) {
        std::string wrong;
        if (name != "mount" && name != "namespace" && name != "revision" && name != "timeout_ms" && name != "depth")
            return "no parameter '" + name.substr(0, 64) + "': there are mount, namespace, revision, timeout_ms and depth";
        if (text.find('\0') != std::string::npos)
            return name + " has a zero byte in it";
        if (text.empty())
            continue;
        if (name == "mount")
            mount = text;
        else if (name == "namespace")
            space = text;
        else if (name == "revision" && (text.find('/') != std::string::npos || text.size() > 199))
            wrong = "revision is '" + text.substr(0, 64) + "': up to 199 bytes without '/' are possible";
        else if (name == "revision")
            revision = text;
        else if (name == "timeout_ms")
            wrong = number(name, text, 3600000, &timeout_ms);
        else
            wrong = number(name, text, 64, &depth);
        if (!wrong.empty())
            return wrong;
    }
    if (!revision.empty())
        space = revised(space, revision);
    return mount.empty() ? "the parameter 'mount' is missing: a directory on a kvfs mount" : "";
}

/* ---- the client ---- */

Pool::Pool(const Settings &settings) : settings_(settings) {}

Client Pool::there() const {
    std::lock_guard<std::mutex> guard(lock_);
    return client_;
}

Client Pool::connected() {
    if (Client client = there())
        return client;
    std::lock_guard<std::mutex> guard(connecting_);
    Client client = there();
    if (client || steady_clock::now() < next_attempt_)
        return client;
    struct kvfs_options options = {};
    options.size = sizeof(options);
    options.timeout_ms = settings_.timeout_ms;
    options.depth = settings_.depth;
    struct kvfs_client *made = nullptr;
    if (kvfs_connect(settings_.mount.c_str(), settings_.space.c_str(), &options, &made) < 0) {
        say("%s", kvfs_error());
        next_attempt_ = steady_clock::now() + seconds(1);
        return nullptr;
    }
    client = Client(made, kvfs_close);
    std::lock_guard<std::mutex> in(lock_);
    return client_ = client;
}

/* A call as a whole failed. A pool that was formatted again wants a new client; all else mends itself. */
void Pool::failed(const Client &client, int error) {
    say("%s", kvfs_error());
    if (error != -ESTALE)
        return;
    std::lock_guard<std::mutex> guard(lock_);
    if (client_ == client)
        client_ = nullptr;
}

Status status_of(int64_t error) {
    switch (error) {
    case -ENOENT:
    case -EIO:
    case -ETIMEDOUT: return Status::not_found; /* a miss, whatever the reason is */
    case -EINVAL:
    case -EFBIG: return Status::invalid_parameter;
    case -EROFS:
    case -EACCES:
    case -EPERM: return Status::not_allowed;
    default: return error < 0 ? Status::backend : Status::success;
    }
}

bool key_fits(const std::string &key) { return !key.empty() && key.size() <= KVFS_KEY_MAX; }

void Owed::add(const Client &client, const kvfs_buffer &memory) {
    std::lock_guard<std::mutex> guard(lock_);
    memory_.emplace_back(client, memory);
}

bool Owed::any() {
    std::lock_guard<std::mutex> guard(lock_);
    std::erase_if(memory_, [](const auto &one) { return kvfs_busy(one.first.get(), one.second.data, one.second.size) <= 0; });
    return !memory_.empty();
}

/* ---- batches ---- */

Batch::Batch(std::vector<Run> &&given) : runs(std::move(given)), results(runs.size()) {
    bool single = true;
    for (const Run &run : runs) {
        key_bytes_ += run.key;
        key_sizes_.push_back((uint32_t)run.key.size());
        struct kvfs_vector vector = {};
        vector.pieces = run.pieces.data();
        vector.count = (uint32_t)run.pieces.size();
        vector.offset = run.offset;
        vectors.push_back(vector);
        single = single && run.pieces.size() == 1;
    }
    for (size_t i = 0; single && i < runs.size(); i++)
        buffers.push_back(runs[i].pieces[0]);
}

struct kvfs_keys Batch::keys() const {
    struct kvfs_keys keys = {};
    keys.data = key_bytes_.data();
    keys.sizes = key_sizes_.data();
    keys.count = (uint32_t)key_sizes_.size();
    return keys;
}

Status Pool::get(Batch &batch, Owed &owed) {
    Client client = connected();
    if (!client)
        return Status::backend;
    const std::vector<Run> &runs = batch.runs;
    struct kvfs_keys keys = batch.keys();
    int r = kvfs_sizes(client.get(), &keys, batch.results.data());
    bool whole = batch.buffers.size() == runs.size();
    for (size_t i = 0; r == 0 && i < runs.size(); i++) {
        uint64_t there = (uint64_t)batch.results[i];
        if (batch.results[i] < 0)
            return Status::not_found;
        if (there < runs[i].offset || there - runs[i].offset < runs[i].size)
            return Status::mismatch;
        whole = whole && there == runs[i].size;
    }
    if (r == 0)
        r = whole ? kvfs_get(client.get(), &keys, batch.buffers.data(), batch.results.data())
                  : kvfs_get_ranges(client.get(), &keys, batch.vectors.data(), batch.results.data());
    if (r < 0) {
        failed(client, r);
        return status_of(r) == Status::not_found ? Status::backend : status_of(r);
    }
    Status status = Status::success;
    for (size_t i = 0; i < runs.size(); i++) {
        int64_t result = batch.results[i];
        if (result == -ETIMEDOUT)
            for (const kvfs_buffer &piece : runs[i].pieces)
                owed.add(client, piece);
        if (status != Status::success || result == (int64_t)runs[i].size)
            continue;
        status = result >= 0 || result == -ERANGE ? Status::mismatch : status_of(result); /* replaced meanwhile, by another size */
    }
    return status;
}

Status Pool::put(Batch &batch) {
    Client client = connected();
    if (!client)
        return Status::backend;
    const std::vector<Run> &runs = batch.runs;
    struct kvfs_keys keys = batch.keys();
    bool single = batch.buffers.size() == runs.size();
    int r = single ? kvfs_put(client.get(), &keys, batch.buffers.data(), batch.results.data())
                   : kvfs_put_vectors(client.get(), &keys, batch.vectors.data(), nullptr, batch.results.data());
    if (r < 0) {
        failed(client, r);
        return status_of(r) == Status::not_found ? Status::backend : status_of(r);
    }
    for (size_t i = 0; i < runs.size(); i++)
        if (batch.results[i] < 0) {
            int error = (int)-batch.results[i];
            say("%s: %zu of %zu objects were not stored: %s", settings_.mount.c_str(), runs.size() - (size_t)r, runs.size(), strerror(error));
            return status_of(-error) == Status::not_found ? Status::backend : status_of(-error);
        }
    return Status::success;
}

bool Pool::sizes(const std::vector<std::string> &names, std::vector<int64_t> &sizes) {
    Client client = there();
    std::vector<Run> asked;
    std::vector<size_t> places;
    sizes.assign(names.size(), -1);
    if (!client)
        return false;
    for (size_t i = 0; i < names.size(); i++)
        if (key_fits(names[i])) {
            asked.emplace_back().key = names[i];
            places.push_back(i);
        }
    Batch batch(std::move(asked));
    struct kvfs_keys keys = batch.keys();
    int r = keys.count ? kvfs_sizes(client.get(), &keys, batch.results.data()) : 0;
    if (r < 0) {
        failed(client, r);
        return false;
    }
    for (size_t i = 0; i < places.size(); i++)
        sizes[places[i]] = batch.results[i] < 0 ? -1 : batch.results[i];
    return true;
}
