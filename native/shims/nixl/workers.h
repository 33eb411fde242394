/* Threads that a back end makes once, and the work that waits for them. A post must not block, and calls of libkvfs take as long as devices do. */
#ifndef KVFS_NIXL_WORKERS_H
#define KVFS_NIXL_WORKERS_H

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <pthread.h>
#include <thread>
#include <vector>

/* In slices that may run side by side. The object is kept until the last of them has ended. */
class Work {
  public:
    virtual ~Work() = default;
    virtual void run(uint32_t slice, uint32_t slices) noexcept = 0;

  private:
    friend class Workers;
    uint32_t slices_ = 0, taken_ = 0;
};

class Workers {
  public:
    /* Throws std::system_error if a thread cannot be made. */
    explicit Workers(unsigned count);
    /* Drops what has not begun and waits for what has: it writes into memory of the caller's. */
    ~Workers();
    /* Never blocks. The work is in no queue already. */
    void post(const std::shared_ptr<Work> &work, uint32_t slices);
    /* Takes back what has not begun; returns how many slices that is. */
    uint32_t withdraw(const std::shared_ptr<Work> &work);
    unsigned count() const { return (unsigned)threads_.size(); }

  private:
    void loop();
    void stop();

    std::mutex lock_;                                /* all below but threads_ */
    pthread_cond_t more_ = PTHREAD_COND_INITIALIZER; /* std's would ask for the libstdc++ of gcc 12 */
    std::deque<std::shared_ptr<Work>> waiting_;
    bool stopping_ = false;
    std::vector<std::thread> threads_;
};

#endif
