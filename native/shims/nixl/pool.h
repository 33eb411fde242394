/* A pool of kvfs as a back end sees it: its settings, a client that comes back by itself, and batches with one status.
 *
 * kvfs that is away is no exception: a look-up is a miss, a transfer fails, and one line on stderr says why. */
#ifndef KVFS_NIXL_POOL_H
#define KVFS_NIXL_POOL_H

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "abi.h"
#include "kvfs.h"

using Client = std::shared_ptr<struct kvfs_client>; /* closed by its last user */

/* One line on stderr. Of many, 16 at first and one a second from then on; the next line says how many were left out. */
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));

struct Settings {
    std::string mount, space; /* as for kvfs_connect() */
    uint32_t timeout_ms = 0, depth = 0;

    static nixl::Parameters defaults();
    /* Empty, or what is wrong. An empty value is one that is not given. */
    std::string read(const nixl::Parameters &parameters);
};

/* Bytes of one object that lie together, in memory that may lie in pieces. */
struct Run {
    std::string key;
    uint64_t offset = 0, size = 0;
    std::vector<kvfs_buffer> pieces;
};

/* Runs as libkvfs takes them. It points into itself, and holds the results of one call at a time. */
class Batch {
  public:
    Batch() = default;
    explicit Batch(std::vector<Run> &&runs);
    Batch(const Batch &) = delete;
    Batch &operator=(Batch &&) = default;
    struct kvfs_keys keys() const;

    std::vector<Run> runs;
    std::vector<kvfs_buffer> buffers; /* one for each run; none if any run is in pieces */
    std::vector<kvfs_vector> vectors;
    std::vector<int64_t> results;

  private:
    std::string key_bytes_;
    std::vector<uint32_t> key_sizes_;
};

/* Memory that a device which gave no answer in time may still write into: the caller must not have it back yet. */
class Owed {
  public:
    void add(const Client &client, const kvfs_buffer &memory);
    /* Asks nobody and waits for nothing. */
    bool any();

  private:
    std::mutex lock_;
    std::vector<std::pair<Client, kvfs_buffer>> memory_;
};

class Pool {
  public:
    explicit Pool(const Settings &settings);
    const std::string &mount() const { return settings_.mount; }

    /* The client, connected now if there is none: at most once a second, for at most timeout_ms. Null: kvfs is away, and that was said. */
    Client connected();
    /* The client if there is one; waits for nothing. */
    Client there() const;

    /* Whole objects or parts of them. not_found: any is not there, or its bytes cannot be had. mismatch: an object ends before a run does. */
    nixl::Status get(Batch &batch, Owed &owed);
    /* Whole objects: each run is one, from offset 0, and no key comes twice. */
    nixl::Status put(Batch &batch);
    /* sizes[i]: of the object, or -1. False: nobody can say. Waits for no device. */
    bool sizes(const std::vector<std::string> &keys, std::vector<int64_t> &sizes);

  private:
    void failed(const Client &client, int error);

    const Settings settings_;
    std::mutex connecting_; /* one thread connects; taken before lock_ */
    std::chrono::steady_clock::time_point next_attempt_;
    mutable std::mutex lock_;
    Client client_;
};

/* NIXL's name of a status of libkvfs. */
nixl::Status status_of(int64_t error);
/* 1 to KVFS_KEY_MAX bytes. */
bool key_fits(const std::string &key);

#endif
