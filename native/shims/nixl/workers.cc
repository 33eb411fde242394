/* Threads that take work from one queue, first come, first served. */
#include "workers.h"

#include <algorithm>
#include <csignal>

Workers::Workers(unsigned count) {
    /* Signals of the program are for its own threads. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        for (unsigned i = 0; i < count; i++)
            threads_.emplace_back(&Workers::loop, this);
    } catch (...) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        stop();
        throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Workers::~Workers() { stop(); }

void Workers::stop() {
    {
        std::lock_guard<std::mutex> guard(lock_);
        stopping_ = true;
        waiting_.clear();
    }
    pthread_cond_broadcast(&more_);
    for (std::thread &thread : threads_)
        thread.join();
}

void Workers::post(const std::shared_ptr<Work> &work, uint32_t slices) {
    {
        std::lock_guard<std::mutex> guard(lock_);
        waiting_.push_back(work);
        work->slices_ = slices;
        work->taken_ = 0;
    }
    slices == 1 ? pthread_cond_signal(&more_) : pthread_cond_broadcast(&more_);
}

uint32_t Workers::withdraw(const std::shared_ptr<Work> &work) {
    std::lock_guard<std::mutex> guard(lock_);
    auto found = std::find(waiting_.begin(), waiting_.end(), work);
    if (found == waiting_.end())
        return 0;
    waiting_.erase(found);
    return work->slices_ - work->taken_;
}

void Workers::loop() {
    pthread_setname_np(pthread_self(), "kvfs-nixl");
    std::unique_lock<std::mutex> guard(lock_);
    for (;;) {
        while (!stopping_ && waiting_.empty())
            pthread_cond_wait(&more_, lock_.native_handle());
        if (stopping_)
            return;
        std::shared_ptr<Work> work = waiting_.front();
        uint32_t slice = work->taken_++, slices = work->slices_;
        if (work->taken_ == slices)
            waiting_.pop_front();
        guard.unlock();
        work->run(slice, slices);
        work.reset();
        guard.lock();
    }
}
