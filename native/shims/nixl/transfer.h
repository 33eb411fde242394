/* One transfer: what was prepared, and where it stands. */
#ifndef KVFS_NIXL_TRANSFER_H
#define KVFS_NIXL_TRANSFER_H

#include <atomic>
#include <memory>
#include <vector>

#include "files.h"
#include "pool.h"
#include "workers.h"

/* A registered object or file: what NIXL hands back beside each remote descriptor. */
struct Target : nixl::Metadata {
    nixl::Memory memory = nixl::Memory::object;
    uint64_t device = 0;
    bool keeps_device = false;  /* no other target may have this device number */
    std::string key;            /* an object's; of a file its path, or nothing */
    std::shared_ptr<File> file; /* a file's; kept by transfers that go on */
};

/* A part of a file and its memory. */
struct FilePart {
    std::shared_ptr<File> file;
    uint64_t offset;
    kvfs_buffer memory;
};

class Transfer : public Work {
  public:
    explicit Transfer(Pool &pool, nixl::Operation operation) : pool_(pool), operation_(operation) {}

    /* success, or the reason why this cannot be transferred, which was said. */
    nixl::Status prepare(const std::vector<nixl::Part> &local, const std::vector<nixl::Part> &remote, nixl::Memory memory);
    /* Into how many slices the work can be cut. Objects are one batch: libkvfs keeps many of them in flight. */
    uint32_t slices(uint32_t most) const;
    /* Before the work is posted. */
    void begin(uint32_t slices);
    void run(uint32_t slice, uint32_t slices) noexcept override;
    /* Slices that will not run, as they were withdrawn: they count as ended. */
    void withdrawn(uint32_t slices);
    /* From here on no slice begins to touch memory. */
    void cancel() { canceled_ = true; }
    /* in_progress as long as anything may touch the caller's memory. */
    nixl::Status status();

  private:
    nixl::Status prepare_objects(const std::vector<nixl::Part> &local, const std::vector<nixl::Part> &remote);
    nixl::Status run_files(uint32_t slice, uint32_t slices);

    Pool &pool_;
    const nixl::Operation operation_;
    Batch objects_;
    std::vector<FilePart> files_;
    Owed owed_;
    std::atomic<bool> canceled_ = false;
    std::atomic<nixl::Status> status_ = nixl::Status::success; /* the first failure */
    std::atomic<uint32_t> left_ = 0;                           /* slices that have not ended */
};

#endif
