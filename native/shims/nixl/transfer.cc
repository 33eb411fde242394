/* How a transfer is prepared from descriptors, and run. */
#include "transfer.h"

#include <algorithm>
#include <numeric>

using nixl::Status;

Status Transfer::prepare(const std::vector<nixl::Part> &local, const std::vector<nixl::Part> &remote, nixl::Memory memory) {
    for (const nixl::Part &part : remote) {
        const Target *target = static_cast<const Target *>(part.metadata);
        if (!target || target->memory != memory || part.address + part.size < part.address)
            return Status::invalid_parameter;
    }
    if (memory == nixl::Memory::object)
        return prepare_objects(local, remote);
    for (size_t i = 0; i < remote.size(); i++)
        files_.push_back({static_cast<const Target *>(remote[i].metadata)->file, remote[i].address, {(void *)local[i].address, local[i].size}});
    return Status::success;
}

/* Descriptors that follow one another in an object are one run of it. */
Status Transfer::prepare_objects(const std::vector<nixl::Part> &local, const std::vector<nixl::Part> &remote) {
    auto key = [&](size_t i) -> const std::string & { return static_cast<const Target *>(remote[i].metadata)->key; };
    std::vector<size_t> order(remote.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
        int different = key(a).compare(key(b));
        return different ? different < 0 : remote[a].address < remote[b].address;
    });
    std::vector<Run> runs;
    for (size_t i : order) {
        Run *last = runs.empty() ? nullptr : &runs.back();
        bool same = last && last->key == key(i);
        if (!same || remote[i].address != last->offset + last->size) {
            if (operation_ == nixl::Operation::write && (same || remote[i].address != 0)) {
                say("an object is written as a whole, from offset 0: no write of %zu bytes at %zu alone", remote[i].size, (size_t)remote[i].address);
                return Status::not_supported;
            }
            last = &runs.emplace_back();
            last->key = key(i);
            last->offset = remote[i].address;
        }
        last->pieces.push_back({(void *)local[i].address, local[i].size});
        last->size += local[i].size;
    }
    objects_ = Batch(std::move(runs));
    return Status::success;
}

uint32_t Transfer::slices(uint32_t most) const { return std::max(1u, std::min(most, (uint32_t)files_.size())); }

void Transfer::begin(uint32_t slices) {
    canceled_ = false;
    status_ = Status::success;
    left_ = slices;
}

void Transfer::run(uint32_t slice, uint32_t slices) noexcept {
    Status status = Status::canceled, expected = Status::success;
    try {
        if (!canceled_ && status_ == Status::success)
            status = !files_.empty()                       ? run_files(slice, slices)
                     : operation_ == nixl::Operation::read ? pool_.get(objects_, owed_)
                                                           : pool_.put(objects_);
    } catch (...) { /* no memory */
        status = Status::backend;
    }
    if (status != Status::success)
        status_.compare_exchange_strong(expected, status);
    left_--;
}

Status Transfer::run_files(uint32_t slice, uint32_t slices) {
    size_t first = files_.size() * slice / slices, last = files_.size() * (slice + 1) / slices;
    Status status = Status::success;
    Client client = pool_.connected();
    for (size_t i = first; i < last && status == Status::success && !canceled_; i++) {
        const FilePart &part = files_[i];
        status = operation_ == nixl::Operation::read ? part.file->read(client, part.offset, part.memory, owed_)
                                                     : part.file->write(part.offset, part.memory);
    }
    return canceled_ && status == Status::success ? Status::canceled : status;
}

void Transfer::withdrawn(uint32_t slices) {
    Status expected = Status::success;
    if (slices)
        status_.compare_exchange_strong(expected, Status::canceled);
    left_ -= slices;
}

Status Transfer::status() {
    if (left_ || owed_.any())
        return Status::in_progress;
    return status_;
}
