/* The native half of `tools/bench`: libkvfs called in fixed loops, in one process or in several that start together.
 *
 * One command a run, one JSON object on stdout, its fields those of bench_client. Blocks are numbered; key and content follow from the number, so one
 * run can check the blocks of another's put. get reads every block once and compares every byte before the clock starts, and compares the last batch
 * again when it has stopped. put reads its last batch back. A miss, a wrong byte, a wrong answer of exists: status 1.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <getopt.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench_common.h"
#include "kvfs.h"
#include "block/checksum.h"

#define KEY_SIZE 16u
#define PROCESSES_MAX 64u
#define MISSING (1ull << 40) /* blocks from this number on are never put */
#define SECRET 0x9e3779b97f4a7c15u
#define CONTENT 1u /* the seed of every block's bytes */

static const char program[] = "native_client";

struct options {
    const char *mount, *space;
    uint64_t size, count, first, part;
    uint32_t batch, depth, passes, processes, seed, timeout_ms;
    bool missing, no_verify, packable;
};

/* The report of a process to its parent, in shared memory. */
struct report {
    uint64_t start_ns, end_ns, busy_ns, operations, bytes, calls;
    double user_s, system_s;
    struct kvfs_client_statistics statistics;
};

struct shared {
    pthread_barrier_t start;
    struct report reports[PROCESSES_MAX];
    uint64_t latencies_ns[]; /* of calls: calls_max a process */
};

struct job {
    struct options options;
    struct shared *shared;
    uint64_t calls_max;
    uint32_t rank; /* of this process */
    struct report *report;
    uint64_t *latencies_ns;
    struct kvfs_client *client;
    uint64_t *numbers; /* this process's blocks */
    uint64_t number_count;
    unsigned char *content; /* of a block, but for its stamps */
    unsigned char *memory;  /* batch * size bytes */
    struct rusage before;
    struct kvfs_client_statistics counted;
};

/* ---- keys and content ---- */

/* Big-endian: a hash of the number, then the number. tools/benches/python_client.py makes the same. */
static void key_make(uint64_t number, uint8_t *out) {
    uint64_t parts[2] = {__builtin_bswap64(number * 0x9e3779b97f4a7c15u), __builtin_bswap64(number)};
    memcpy(out, parts, KEY_SIZE);
}

static void job_content(struct job *job) {
    job->content = allocate(job->options.size);
    content_make(job->content, job->options.size, CONTENT, job->options.packable);
}

/* ---- batches ---- */

struct batch {
    uint8_t *key_bytes;
    uint32_t *key_sizes;
    struct kvfs_keys keys;
    struct kvfs_buffer *buffers;
    int64_t *results;
    uint8_t *found;
};

static void batch_make(struct batch *batch, uint32_t count) {
    *batch = (struct batch){
        .key_bytes = allocate((uint64_t)count * KEY_SIZE),
        .key_sizes = allocate(count * sizeof(uint32_t)),
        .buffers = allocate(count * sizeof(struct kvfs_buffer)),
        .results = allocate(count * sizeof(int64_t)),
        .found = allocate(count),
    };
}

static void batch_set(struct job *job, struct batch *batch, const uint64_t *numbers, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        key_make(numbers[i], batch->key_bytes + (uint64_t)i * KEY_SIZE);
        batch->key_sizes[i] = KEY_SIZE;
        if (job->memory)
            batch->buffers[i] = (struct kvfs_buffer){job->memory + i * job->options.size, job->options.size};
    }
    batch->keys = (struct kvfs_keys){.data = batch->key_bytes, .sizes = batch->key_sizes, .count = count};
}

static void batch_get(struct job *job, struct batch *batch) {
    int n = kvfs_get(job->client, &batch->keys, batch->buffers, batch->results);
    if (n < 0)
        die("get: %s", kvfs_error());
    for (uint32_t i = 0; i < batch->keys.count; i++)
        if (batch->results[i] != (int64_t)job->options.size)
            die("get of block %u of a batch of %u: %" PRId64 " instead of %" PRIu64 " bytes", i, batch->keys.count, batch->results[i],
                job->options.size);
}

static void batch_compare(struct job *job, const uint64_t *numbers, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        content_stamp(job->content, job->options.size, numbers[i]);
        if (memcmp(job->memory + i * job->options.size, job->content, job->options.size))
            die("block %" PRIu64 ": other bytes than were put", numbers[i]);
    }
}

/* ---- the commands, each in its process ---- */

static void connect_client(struct job *job) {
    const struct options *options = &job->options;
    struct kvfs_options wanted = {.size = sizeof(wanted), .timeout_ms = options->timeout_ms, .depth = options->depth > 64 ? 64 : options->depth};
    wanted.flags = options->no_verify ? KVFS_NO_VERIFY : 0;
    if (kvfs_connect(options->mount, options->space, &wanted, &job->client) < 0)
        die("connect to %s: %s", options->mount, kvfs_error());
}

/* This process's share of the blocks: every processes-th. */
static void share_make(struct job *job) {
    const struct options *options = &job->options;
    job->numbers = allocate(options->count * sizeof(uint64_t));
    for (uint64_t i = job->rank; i < options->count; i += options->processes)
        job->numbers[job->number_count++] = options->first + i + (options->missing ? MISSING : 0);
}

static void shuffle(struct job *job, uint64_t *state) {
    for (uint64_t i = job->number_count - 1; i > 0; i--) {
        uint64_t other = random64(state) % (i + 1), number = job->numbers[i];
        job->numbers[i] = job->numbers[other];
        job->numbers[other] = number;
    }
}

static uint32_t batch_size(const struct job *job, uint64_t at) {
    uint64_t left = job->number_count - at;
    return left < job->options.batch ? (uint32_t)left : job->options.batch;
}

/* All processes go on from here together; what they did so far is not measured. */
static void clock_start(struct job *job) {
    if (job->client && kvfs_client_statistics_get(job->client, &job->counted) < 0)
        die("statistics: %s", kvfs_error());
    pthread_barrier_wait(&job->shared->start);
    getrusage(RUSAGE_SELF, &job->before);
    job->report->start_ns = now_ns();
}

static void clock_add(struct job *job, uint64_t ns, uint64_t operations, uint64_t bytes) {
    struct report *report = job->report;
    job->latencies_ns[report->calls++] = ns;
    report->busy_ns += ns;
    report->operations += operations;
    report->bytes += bytes;
}

static void clock_stop(struct job *job) {
    struct rusage after;
    struct kvfs_client_statistics now = {0};
    struct report *report = job->report;
    report->end_ns = now_ns();
    getrusage(RUSAGE_SELF, &after);
    report->user_s = seconds_of(after.ru_utime) - seconds_of(job->before.ru_utime);
    report->system_s = seconds_of(after.ru_stime) - seconds_of(job->before.ru_stime);
    if (job->client && kvfs_client_statistics_get(job->client, &now) < 0)
        die("statistics: %s", kvfs_error());
    report->statistics.bounced_bytes = now.bounced_bytes - job->counted.bounced_bytes;
    report->statistics.retries = now.retries - job->counted.retries;
}

static void command_get(struct job *job) {
    struct batch batch;
    uint64_t state = job->options.seed + job->rank;
    uint32_t n;
    job_content(job);
    job->memory = allocate(job->options.batch * job->options.size);
    batch_make(&batch, job->options.batch);
    for (uint64_t at = 0; at < job->number_count; at += n) {
        n = batch_size(job, at);
        batch_set(job, &batch, job->numbers + at, n);
        batch_get(job, &batch);
        batch_compare(job, job->numbers + at, n);
    }
    uint64_t last = 0;
    clock_start(job);
    for (uint32_t pass = 0; pass < job->options.passes; pass++) {
        shuffle(job, &state);
        for (uint64_t at = 0; at < job->number_count; at += n) {
            n = batch_size(job, last = at);
            batch_set(job, &batch, job->numbers + at, n);
            uint64_t before = now_ns();
            batch_get(job, &batch);
            clock_add(job, now_ns() - before, n, n * job->options.size);
        }
    }
    clock_stop(job);
    batch_compare(job, job->numbers + last, batch.keys.count);
}

/* A part of every block, another one in each pass. */
static void command_ranges(struct job *job) {
    const uint64_t part = job->options.part, parts = job->options.size / part;
    struct kvfs_vector *vectors = allocate(job->options.batch * sizeof(*vectors));
    struct batch batch;
    uint64_t state = job->options.seed + job->rank;
    uint32_t n = 0;
    job_content(job);
    job->memory = allocate(job->options.batch * job->options.size);
    batch_make(&batch, job->options.batch);
    clock_start(job);
    for (uint32_t pass = 0; pass < job->options.passes; pass++) {
        const uint64_t offset = pass % parts * part;
        shuffle(job, &state);
        for (uint64_t at = 0; at < job->number_count; at += n) {
            n = batch_size(job, at);
            batch_set(job, &batch, job->numbers + at, n);
            for (uint32_t i = 0; i < n; i++) {
                batch.buffers[i].size = part;
                vectors[i] = (struct kvfs_vector){&batch.buffers[i], 1, 0, offset};
            }
            uint64_t before = now_ns();
            if (kvfs_get_ranges(job->client, &batch.keys, vectors, batch.results) != (int)n)
                die("ranges: %s", kvfs_error());
            clock_add(job, now_ns() - before, n, n * part);
            for (uint32_t i = 0; i < n && pass + 1 == job->options.passes; i++) {
                content_stamp(job->content, job->options.size, job->numbers[at + i]);
                if (batch.results[i] != (int64_t)part || memcmp(batch.buffers[i].data, job->content + offset, part))
                    die("block %" PRIu64 ": other bytes than were put", job->numbers[at + i]);
            }
        }
    }
    clock_stop(job);
}

/* One thread that submits to a queue. There are batches enough that `depth` blocks are in flight, and one waits. */
static void command_queue(struct job *job) {
    const struct options *options = &job->options;
    const uint32_t slots = options->depth / options->batch + 1;
    struct slot {
        struct batch batch;
        struct kvfs_vector *vectors;
        const uint64_t *numbers;
        unsigned char *memory;
        int64_t id;
        uint64_t began_ns;
    } *all = allocate(slots * sizeof(*all)), *slot;
    struct kvfs_queue_completion done;
    struct kvfs_queue *queue;
    uint64_t state = options->seed + job->rank;
    if (kvfs_queue_open(job->client, options->depth, &queue) < 0)
        die("queue: %s", kvfs_error());
    struct pollfd readable = {.fd = kvfs_queue_fd(queue), .events = POLLIN};
    for (slot = all; slot < all + slots; slot++) {
        *slot = (struct slot){.vectors = allocate(options->batch * sizeof(*slot->vectors)), .memory = allocate(options->batch * options->size)};
        batch_make(&slot->batch, options->batch);
    }
    job_content(job);
    clock_start(job);
    for (uint32_t pass = 0; pass < options->passes; pass++) {
        uint64_t at = 0, ended = 0;
        shuffle(job, &state);
        while (ended < job->number_count) {
            for (slot = all; slot < all + slots && at < job->number_count; slot++) {
                if (slot->id)
                    continue;
                job->memory = slot->memory;
                slot->numbers = job->numbers + at;
                batch_set(job, &slot->batch, slot->numbers, batch_size(job, at));
                for (uint32_t i = 0; i < slot->batch.keys.count; i++)
                    slot->vectors[i] = (struct kvfs_vector){&slot->batch.buffers[i], 1, 0, 0};
                slot->began_ns = now_ns();
                slot->id = kvfs_queue_get(queue, &slot->batch.keys, slot->vectors, slot->batch.results);
                if (slot->id < 0)
                    die("queue: %s", kvfs_error());
                at += slot->batch.keys.count;
            }
            poll(&readable, 1, -1);
            while (kvfs_queue_drain(queue, &done, 1) == 1) {
                for (slot = all; slot->id != done.id;)
                    slot++;
                uint32_t n = slot->batch.keys.count;
                if (done.result != (int64_t)n)
                    die("get of a batch of %u: %" PRId64 ": %s", n, done.result, done.error);
                clock_add(job, now_ns() - slot->began_ns, n, n * options->size);
                job->memory = slot->memory;
                if (pass + 1 == options->passes && ended == 0)
                    batch_compare(job, slot->numbers, n);
                slot->id = 0;
                ended += n;
            }
        }
    }
    clock_stop(job);
    kvfs_queue_close(queue);
}

static void command_put(struct job *job) {
    struct batch batch;
    uint32_t n;
    job_content(job);
    job->memory = allocate(job->options.batch * job->options.size);
    for (uint32_t i = 0; i < job->options.batch; i++)
        memcpy(job->memory + i * job->options.size, job->content, job->options.size);
    batch_make(&batch, job->options.batch);
    uint64_t last = 0;
    clock_start(job);
    for (uint64_t at = 0; at < job->number_count; at += n) {
        n = batch_size(job, last = at);
        batch_set(job, &batch, job->numbers + at, n);
        for (uint32_t i = 0; i < n; i++)
            content_stamp(job->memory + i * job->options.size, job->options.size, job->numbers[at + i]);
        uint64_t before = now_ns();
        if (kvfs_put(job->client, &batch.keys, batch.buffers, batch.results) < 0)
            die("put: %s", kvfs_error());
        clock_add(job, now_ns() - before, n, n * job->options.size);
        for (uint32_t i = 0; i < n; i++)
            if (batch.results[i])
                die("put of block %" PRIu64 ": %s", job->numbers[at + i], strerror((int)-batch.results[i]));
    }
    clock_stop(job);
    memset(job->memory, 0, job->options.batch * job->options.size);
    batch_get(job, &batch);
    batch_compare(job, job->numbers + last, batch.keys.count);
}

static void command_exists(struct job *job) {
    struct batch batch;
    uint64_t state = job->options.seed + job->rank, right = 0;
    uint32_t n;
    batch_make(&batch, job->options.batch);
    clock_start(job);
    for (uint32_t pass = 0; pass < job->options.passes; pass++) {
        shuffle(job, &state);
        for (uint64_t at = 0; at < job->number_count; at += n) {
            n = batch_size(job, at);
            batch_set(job, &batch, job->numbers + at, n);
            uint64_t before = now_ns();
            if (kvfs_exists(job->client, &batch.keys, batch.found) < 0)
                die("exists: %s", kvfs_error());
            clock_add(job, now_ns() - before, n, 0);
            for (uint32_t i = 0; i < n; i++)
                right += batch.found[i] != job->options.missing;
        }
    }
    clock_stop(job);
    if (right != job->report->operations)
        die("exists: %" PRIu64 " of %" PRIu64 " answers are wrong", job->report->operations - right, job->report->operations);
}

/* The cost of libkvfs's checks by themselves, over as much memory as a batch of get fills. */
static void command_checksum(struct job *job) {
    const struct options *options = &job->options;
    uint64_t leaves = (options->size + PAGE - 1) / PAGE;
    uint64_t *sums = allocate(options->batch * leaves * sizeof(*sums));
    job_content(job);
    job->memory = allocate(options->batch * options->size);
    for (uint32_t i = 0; i < options->batch; i++) {
        memcpy(job->memory + i * options->size, job->content, options->size);
        content_stamp(job->memory + i * options->size, options->size, i);
        kvfs_leaf_checksums(job->memory + i * options->size, options->size, SECRET, sums + i * leaves);
    }
    clock_start(job);
    for (uint32_t pass = 0; pass < options->passes; pass++)
        for (uint32_t i = 0; i < options->batch; i++) {
            uint64_t before = now_ns();
            if (kvfs_leaf_verify(job->memory + i * options->size, options->size, SECRET, sums + i * leaves))
                die("checksum: a leaf differs");
            clock_add(job, now_ns() - before, 1, options->size);
        }
    clock_stop(job);
}

/* ---- processes ---- */

struct command {
    const char *name;
    void (*run)(struct job *job);
    bool connects, busy; /* busy: only the time inside calls counts */
};

static const struct command commands[] = {
    {"get", command_get, true, false}, {"ranges", command_ranges, true, true}, {"queue", command_queue, true, false},
    {"put", command_put, true, true},  {"exists", command_exists, true, true}, {"checksum", command_checksum, false, true},
};

static void print_result(const struct command *command, const struct job *job) {
    const struct options *options = &job->options;
    struct report sum = {.start_ns = UINT64_MAX};
    uint64_t *all = allocate(options->processes * job->calls_max * sizeof(*all));
    double total = 0;
    for (uint32_t i = 0; i < options->processes; i++) {
        const struct report *report = &job->shared->reports[i];
        for (uint64_t j = 0; j < report->calls; j++)
            total += (double)(all[sum.calls++] = job->shared->latencies_ns[i * job->calls_max + j]);
        sum.start_ns = report->start_ns < sum.start_ns ? report->start_ns : sum.start_ns;
        sum.end_ns = report->end_ns > sum.end_ns ? report->end_ns : sum.end_ns;
        sum.busy_ns = report->busy_ns > sum.busy_ns ? report->busy_ns : sum.busy_ns;
        sum.operations += report->operations;
        sum.bytes += report->bytes;
        sum.user_s += report->user_s;
        sum.system_s += report->system_s;
        sum.statistics.bounced_bytes += report->statistics.bounced_bytes;
        sum.statistics.retries += report->statistics.retries;
    }
    qsort(all, sum.calls, sizeof(*all), by_value);
#define AT(percent) ((double)all[(sum.calls - 1) * (percent) / 100] / 1000)
    printf("{\"command\": \"%s\", \"processes\": %u, \"depth\": %u, \"batch\": %u, \"size\": %" PRIu64 ", \"operations\": %" PRIu64
           ", \"bytes\": %" PRIu64 ", \"seconds\": %.9f, \"calls\": %" PRIu64 ", ",
           command->name, options->processes, options->depth, options->batch, options->size, sum.operations, sum.bytes,
           (double)(command->busy ? sum.busy_ns : sum.end_ns - sum.start_ns) / 1e9, sum.calls);
    printf("\"latency_us\": {\"mean\": %.3f, \"p50\": %.3f, \"p90\": %.3f, \"p99\": %.3f, \"max\": %.3f}, "
           "\"cpu_s\": {\"user\": %.6f, \"system\": %.6f}, \"bounced_bytes\": %" PRIu64 ", \"retries\": %" PRIu64 "}\n",
           total / (double)sum.calls / 1000, AT(50), AT(90), AT(99), AT(100), sum.user_s, sum.system_s, sum.statistics.bounced_bytes,
           sum.statistics.retries);
#undef AT
    free(all);
}

__attribute__((noreturn)) static void child(const struct command *command, struct job *job, uint32_t rank) {
    job->rank = rank;
    job->report = &job->shared->reports[rank];
    job->latencies_ns = job->shared->latencies_ns + rank * job->calls_max;
    share_make(job);
    if (command->connects)
        connect_client(job);
    command->run(job);
    if (job->client)
        kvfs_close(job->client);
    exit(0);
}

/* Every process connects for itself: a client does not outlive a fork. */
static void run(const struct command *command, struct job *job) {
    const struct options *options = &job->options;
    pid_t pids[PROCESSES_MAX];
    pthread_barrierattr_t attributes;
    uint64_t blocks = command->connects ? options->count / options->processes + 1 : options->batch;
    uint64_t batch = command->connects ? options->batch : 1;
    job->calls_max = (blocks + batch - 1) / batch * options->passes;
    job->shared = mmap(NULL, sizeof(*job->shared) + options->processes * job->calls_max * sizeof(uint64_t), PROT_READ | PROT_WRITE,
                       MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (job->shared == MAP_FAILED || pthread_barrierattr_init(&attributes) || pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED) ||
        pthread_barrier_init(&job->shared->start, &attributes, options->processes))
        die("no memory");
    for (uint32_t i = 0; i < options->processes; i++) {
        pids[i] = fork();
        if (pids[i] < 0)
            die("fork: %s", strerror(errno));
        if (pids[i] == 0)
            child(command, job, i);
    }
    for (uint32_t left = options->processes; left > 0; left--) {
        int status;
        pid_t pid = wait(&status);
        if (pid >= 0 && status == 0) {
            for (uint32_t i = 0; i < options->processes; i++)
                pids[i] = pids[i] == pid ? 0 : pids[i];
            continue;
        }
        for (uint32_t i = 0; i < options->processes; i++) /* the others wait for it at the barrier */
            if (pids[i] > 0 && pids[i] != pid)
                kill(pids[i], SIGKILL);
        die("%s: process %d ended with status 0x%x", command->name, (int)pid, (unsigned)status);
    }
    print_result(command, job);
}

/* ---- the command line ---- */

static const char usage[] =
    "usage: native_client COMMAND [options]; the driver is `tools/bench`\n"
    "  put       --mount M --space S   blocks FIRST to FIRST + COUNT, in batches\n"
    "  get       --mount M --space S   each of them --passes times, in random order; --batch 1: latencies are of blocks\n"
    "  ranges    --mount M --space S   --part bytes of each of them, in batches\n"
    "  queue     --mount M --space S   each of them through a queue of --depth blocks, by one thread in batches of --batch\n"
    "  exists    --mount M --space S   the same without bytes; --missing: of as many that are not there\n"
    "  checksum                        leaf checksums of --batch blocks in memory\n"
    "options: --size B --part B --count N --first N --batch N --depth N --passes N --processes N --seed N --timeout-ms N --no-verify --packable\n";

static uint64_t number(const char *text, uint64_t most) {
    char *end;
    errno = 0;
    uint64_t value = strtoull(text, &end, 10);
    if (errno || end == text || *end || value > most)
        die("%s: not a number up to %" PRIu64, text, most);
    return value;
}

int main(int argc, char **argv) {
    static const struct option longs[] = {
        {"mount", 1, NULL, 'm'},     {"space", 1, NULL, 'S'},     {"size", 1, NULL, 's'},     {"count", 1, NULL, 'c'},
        {"first", 1, NULL, 'f'},     {"batch", 1, NULL, 'b'},     {"depth", 1, NULL, 'd'},    {"passes", 1, NULL, 'p'},
        {"processes", 1, NULL, 'P'}, {"seed", 1, NULL, 'e'},      {"part", 1, NULL, 'a'},     {"timeout-ms", 1, NULL, 't'},
        {"missing", 0, NULL, 'M'},   {"no-verify", 0, NULL, 'N'}, {"packable", 0, NULL, 'K'}, {NULL, 0, NULL, 0},
    };
    static struct job job;
    struct options *options = &job.options;
    *options = (struct options){.space = "", .size = PAGE, .count = 1, .part = PAGE, .batch = 64, .depth = 8, .passes = 1, .processes = 1, .seed = 1};
    for (int option; (option = getopt_long(argc, argv, "", longs, NULL)) != -1;) {
        switch (option) {
        case 'm': options->mount = optarg; break;
        case 'S': options->space = optarg; break;
        case 's': options->size = number(optarg, 1u << 30); break;
        case 'a': options->part = number(optarg, 1u << 30); break;
        case 'c': options->count = number(optarg, MISSING); break;
        case 'f': options->first = number(optarg, MISSING); break;
        case 'b': options->batch = (uint32_t)number(optarg, 1u << 20); break;
        case 'd': options->depth = (uint32_t)number(optarg, 256); break;
        case 'p': options->passes = (uint32_t)number(optarg, 1u << 20); break;
        case 'P': options->processes = (uint32_t)number(optarg, PROCESSES_MAX); break;
        case 'e': options->seed = (uint32_t)number(optarg, UINT32_MAX); break;
        case 't': options->timeout_ms = (uint32_t)number(optarg, UINT32_MAX); break;
        case 'M': options->missing = true; break;
        case 'N': options->no_verify = true; break;
        case 'K': options->packable = true; break;
        default: fputs(usage, stderr); return 2;
        }
    }
    const struct command *command = NULL;
    for (size_t i = 0; i < sizeof(commands) / sizeof(*commands); i++)
        if (optind + 1 == argc && !strcmp(argv[optind], commands[i].name))
            command = &commands[i];
    if (!command || options->size == 0 || (command->run == command_ranges && (options->part == 0 || options->part > options->size)) ||
        options->batch == 0 || options->passes == 0 || options->processes == 0 || options->count < options->processes ||
        (command->connects && !options->mount)) {
        fputs(usage, stderr);
        return 2;
    }
    run(command, &job);
    return 0;
}
