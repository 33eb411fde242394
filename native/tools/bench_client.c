/* The client half of `tools/bench`: small, fixed loops of system calls, timed where an interpreter would be most of the time.
 *
 * One command a run, one JSON object on stdout. Every command checks its results. Three results end the run with status 1: a short read, a name that
 * should not be there, a block that reads back as other bytes. The digest (xxh3) is taken outside the timed loop; two filesystems filled with the
 * same seed must show the same.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <liburing.h>
#include <linux/fs.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "bench_common.h"

#define THREADS_MAX 256u
#define DEVICES_MAX 64u
#define PIECES_MAX 1024u

static const char program[] = "bench_client";

struct options {
    const char *list, *dir, *prefix;
    uint64_t size, count, base, span, first, modulo, unit;
    uint32_t threads, dirs, seed;
    bool direct, digest, packable;
};

struct job {
    struct options options;
    char **paths;
    uint64_t path_count;
    uint64_t *places; /* read: file index << 40 | slot, shuffled */
    uint64_t place_count;
    int *fds;
    unsigned char *content; /* write: the pages of a block, but for their stamps */
    atomic_uint_fast64_t next;
    atomic_uint_fast64_t found;
    pthread_barrier_t start;
    uint64_t (*operation)(struct job *job, uint64_t index, unsigned char *buffer); /* returns bytes */
};

struct worker {
    struct job *job;
    pthread_t thread;
    uint64_t *latencies_ns;
    uint64_t count, bytes;
    uint64_t end_ns;
};

static void block_name(const struct options *options, uint64_t block, char *out, size_t capacity) {
    if (options->modulo)
        block %= options->modulo;
    int n = snprintf(out, capacity, "%s/%03" PRIx64 "/%s%08" PRIx64, options->dir, block % options->dirs, options->prefix, block);
    if (n < 0 || (size_t)n >= capacity)
        die("%s: the path is too long", options->dir);
}

/* ---- operations ---- */

static void read_exactly(int fd, const char *path, unsigned char *buffer, uint64_t size, uint64_t offset) {
    uint64_t done = 0;
    while (done < size) {
        ssize_t n = pread(fd, buffer + done, size - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            die("%s: read of %" PRIu64 " at %" PRIu64 ": %s", path, size - done, offset + done, n < 0 ? strerror(errno) : "end of file");
        done += (uint64_t)n;
    }
}

static uint64_t operation_read(struct job *job, uint64_t index, unsigned char *buffer) {
    uint64_t place = job->places[index % job->place_count], file = place >> 40, slot = place & ((1ull << 40) - 1);
    read_exactly(job->fds[file], job->paths[file], buffer, job->options.size, job->options.base + slot * job->options.size);
    return job->options.size;
}

static uint64_t operation_blocks(struct job *job, uint64_t index, unsigned char *buffer) {
    const char *path = job->paths[job->places[index % job->place_count] >> 40];
    int fd = open(path, O_RDONLY | O_CLOEXEC | (job->options.direct ? O_DIRECT : 0));
    if (fd < 0)
        die("%s: open: %s", path, strerror(errno));
    read_exactly(fd, path, buffer, job->options.size, 0);
    close(fd);
    return job->options.size;
}

static uint64_t operation_open(struct job *job, uint64_t index, unsigned char *buffer) {
    (void)buffer;
    const char *path = job->paths[index % job->path_count];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        die("%s: open: %s", path, strerror(errno));
    close(fd);
    return 0;
}

static uint64_t operation_stat(struct job *job, uint64_t index, unsigned char *buffer) {
    (void)buffer;
    char path[4096];
    struct stat status;
    /* Another name every time: a filesystem may remember that a name was missing. */
    snprintf(path, sizeof(path), "%s/missing-%08x-%08" PRIx64, job->options.dir, job->options.seed, index);
    if (stat(path, &status) == 0)
        die("%s: is there, and should not be", path);
    if (errno != ENOENT)
        die("%s: stat: %s", path, strerror(errno));
    return 0;
}

static uint64_t operation_access(struct job *job, uint64_t index, unsigned char *buffer) {
    (void)buffer;
    const char *path = job->paths[index % job->path_count];
    if (faccessat(AT_FDCWD, path, F_OK, 0) == 0)
        atomic_fetch_add_explicit(&job->found, 1, memory_order_relaxed);
    else if (errno != ENOENT)
        die("%s: faccessat: %s", path, strerror(errno));
    return 0;
}

static uint64_t operation_write(struct job *job, uint64_t index, unsigned char *buffer) {
    const struct options *options = &job->options;
    char name[4096], temporary[4100];
    uint64_t block = options->first + index;
    block_name(options, block, name, sizeof(name));
    snprintf(temporary, sizeof(temporary), "%s.tmp", name);
    content_stamp(buffer, options->size, block);
    int fd = open(temporary, O_CREAT | O_EXCL | O_WRONLY | O_TRUNC | O_CLOEXEC | (options->direct ? O_DIRECT : 0), 0644);
    if (fd < 0)
        die("%s: create: %s", temporary, strerror(errno));
    for (uint64_t done = 0; done < options->size;) {
        ssize_t n = write(fd, buffer + done, options->size - done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            die("%s: write: %s", temporary, n < 0 ? strerror(errno) : "nothing written");
        done += (uint64_t)n;
    }
    if (close(fd) < 0)
        die("%s: close: %s", temporary, strerror(errno));
    if (rename(temporary, name) < 0)
        die("%s: rename: %s", name, strerror(errno));
    return options->size;
}

/* ---- running ---- */

static void *worker_main(void *argument) {
    struct worker *worker = argument;
    struct job *job = worker->job;
    unsigned char *buffer = allocate(job->options.size);
    if (job->content)
        memcpy(buffer, job->content, job->options.size);
    pthread_barrier_wait(&job->start);
    for (;;) {
        uint64_t index = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
        if (index >= job->options.count)
            break;
        uint64_t before = now_ns();
        worker->bytes += job->operation(job, index, buffer);
        worker->latencies_ns[worker->count++] = now_ns() - before;
    }
    worker->end_ns = now_ns();
    free(buffer);
    return NULL;
}

static void print_result(const char *command, const struct options *options, uint64_t *latencies_ns, uint64_t count, uint64_t bytes,
                         uint64_t elapsed_ns, const struct rusage *before, uint64_t found, uint64_t digest) {
    struct rusage after;
    getrusage(RUSAGE_SELF, &after);
    qsort(latencies_ns, count, sizeof(*latencies_ns), by_value);
    double total = 0;
    for (uint64_t i = 0; i < count; i++)
        total += (double)latencies_ns[i];
#define AT(percent) ((double)latencies_ns[(count - 1) * (percent) / 100] / 1000)
    printf("{\"command\": \"%s\", \"threads\": %u, \"size\": %" PRIu64 ", \"operations\": %" PRIu64 ", \"bytes\": %" PRIu64
           ", \"seconds\": %.9f, \"latency_us\": {\"mean\": %.3f, \"p50\": %.3f, \"p90\": %.3f, \"p99\": %.3f, \"max\": %.3f}, "
           "\"cpu_s\": {\"user\": %.6f, \"system\": %.6f}, \"found\": %" PRIu64 ", \"digest\": \"%016" PRIx64 "\"}\n",
           command, options->threads, options->size, count, bytes, (double)elapsed_ns / 1e9, total / (double)count / 1000, AT(50), AT(90), AT(99),
           AT(100), seconds_of(after.ru_utime) - seconds_of(before->ru_utime), seconds_of(after.ru_stime) - seconds_of(before->ru_stime), found,
           digest);
#undef AT
}

static void run(const char *command, struct job *job, uint64_t digest) {
    struct options *options = &job->options;
    struct worker *workers = calloc(options->threads, sizeof(*workers));
    uint64_t *all = malloc(options->count * sizeof(*all));
    if (!workers || !all || pthread_barrier_init(&job->start, NULL, options->threads + 1))
        die("no memory");
    for (uint32_t i = 0; i < options->threads; i++) {
        workers[i].job = job;
        workers[i].latencies_ns = malloc(options->count * sizeof(uint64_t));
        if (!workers[i].latencies_ns || pthread_create(&workers[i].thread, NULL, worker_main, &workers[i]))
            die("no thread");
    }
    struct rusage before;
    getrusage(RUSAGE_SELF, &before);
    uint64_t start = now_ns(), end = start, count = 0, bytes = 0;
    pthread_barrier_wait(&job->start);
    for (uint32_t i = 0; i < options->threads; i++) {
        pthread_join(workers[i].thread, NULL);
        memcpy(all + count, workers[i].latencies_ns, workers[i].count * sizeof(*all));
        count += workers[i].count;
        bytes += workers[i].bytes;
        end = workers[i].end_ns > end ? workers[i].end_ns : end;
        free(workers[i].latencies_ns);
    }
    print_result(command, options, all, count, bytes, end - start, &before, atomic_load(&job->found), digest);
    pthread_barrier_destroy(&job->start);
    free(workers);
    free(all);
}

static void read_list(struct job *job) {
    FILE *file = fopen(job->options.list, "r");
    if (!file)
        die("%s: %s", job->options.list, strerror(errno));
    uint64_t capacity = 0;
    char *line = NULL;
    size_t size = 0;
    for (ssize_t n; (n = getline(&line, &size, file)) > 0;) {
        if (line[n - 1] == '\n')
            line[n - 1] = 0;
        if (job->path_count == capacity) {
            capacity = capacity ? 2 * capacity : 1024;
            job->paths = realloc(job->paths, capacity * sizeof(*job->paths));
        }
        if (!job->paths || !(job->paths[job->path_count++] = strdup(line)))
            die("no memory");
    }
    free(line);
    fclose(file);
    if (job->path_count == 0)
        die("%s: no paths in it", job->options.list);
}

static uint64_t size_of(int fd, const char *path) {
    struct stat status;
    uint64_t size = 0;
    if (fstat(fd, &status) < 0 || (S_ISBLK(status.st_mode) && ioctl(fd, BLKGETSIZE64, &size) < 0))
        die("%s: %s", path, strerror(errno));
    return S_ISBLK(status.st_mode) ? size : (uint64_t)status.st_size;
}

/* Every slot of every file once, in an order that depends on the seed alone. */
static void plan(struct job *job, bool whole_files) {
    struct options *options = &job->options;
    uint64_t *slots = calloc(job->path_count, sizeof(*slots)), total = 0;
    if (!slots)
        die("no memory");
    for (uint64_t i = 0; i < job->path_count; i++) {
        slots[i] = 1;
        if (!whole_files) {
            uint64_t size = size_of(job->fds[i], job->paths[i]);
            uint64_t span = size > options->base ? size - options->base : 0;
            if (options->span && options->span < span)
                span = options->span;
            slots[i] = span / options->size;
        }
        total += slots[i];
    }
    if (total == 0)
        die("%s: nothing of %" PRIu64 " bytes to read", options->list, options->size);
    job->places = malloc(total * sizeof(*job->places));
    if (!job->places)
        die("no memory");
    for (uint64_t i = 0; i < job->path_count; i++)
        for (uint64_t slot = 0; slot < slots[i]; slot++)
            job->places[job->place_count++] = i << 40 | slot;
    uint64_t state = options->seed;
    for (uint64_t i = total - 1; i > 0; i--) {
        uint64_t other = random64(&state) % (i + 1), place = job->places[i];
        job->places[i] = job->places[other];
        job->places[other] = place;
    }
    free(slots);
}

static void open_all(struct job *job) {
    job->fds = malloc(job->path_count * sizeof(*job->fds));
    if (!job->fds)
        die("no memory");
    for (uint64_t i = 0; i < job->path_count; i++) {
        job->fds[i] = open(job->paths[i], O_RDONLY | O_CLOEXEC | (job->options.direct ? O_DIRECT : 0));
        if (job->fds[i] < 0)
            die("%s: open: %s", job->paths[i], strerror(errno));
    }
}

static void command_read(struct job *job) {
    read_list(job);
    open_all(job);
    plan(job, false);
    unsigned char *buffer = allocate(job->options.size);
    operation_read(job, 0, buffer);
    uint64_t digest = XXH3_64bits(buffer, job->options.size);
    /* The first read of an open file also reads its block header, which is not what is measured: each file is touched first. */
    for (uint64_t i = 0; i < job->path_count; i++)
        read_exactly(job->fds[i], job->paths[i], buffer, job->options.size, job->options.base);
    free(buffer);
    job->operation = operation_read;
    run("read", job, digest);
}

static void command_blocks(struct job *job) {
    read_list(job);
    plan(job, true);
    unsigned char *buffer = allocate(job->options.size);
    uint64_t digest = 0;
    for (uint64_t i = 0; i < (job->options.digest ? job->place_count : 1); i++) {
        operation_blocks(job, i, buffer);
        digest ^= XXH3_64bits_withSeed(buffer, job->options.size, job->places[i] >> 40);
    }
    free(buffer);
    job->operation = operation_blocks;
    run("blocks", job, digest);
}

static void command_write(struct job *job) {
    struct options *options = &job->options;
    char path[4096];
    for (uint32_t i = 0; i < options->dirs; i++) {
        snprintf(path, sizeof(path), "%s/%03" PRIx32, options->dir, i);
        if (mkdir(path, 0755) < 0 && errno != EEXIST)
            die("%s: mkdir: %s", path, strerror(errno));
    }
    job->content = allocate(options->size);
    content_make(job->content, options->size, options->seed, options->packable);
    content_stamp(job->content, options->size, options->first);
    job->operation = operation_write;
    run("write", job, XXH3_64bits(job->content, options->size));
    /* The last block is what was written. */
    unsigned char *buffer = allocate(options->size);
    content_stamp(job->content, options->size, options->first + options->count - 1);
    block_name(options, options->first + options->count - 1, path, sizeof(path));
    int fd = open(path, O_RDONLY | O_CLOEXEC | (options->direct ? O_DIRECT : 0));
    if (fd < 0)
        die("%s: open: %s", path, strerror(errno));
    read_exactly(fd, path, buffer, options->size, 0);
    close(fd);
    if (memcmp(buffer, job->content, options->size))
        die("%s: other bytes than were written", path);
    free(buffer);
}

/* ---- raw reads of a stripe: RAID-0 over the devices of the list, one readv a device, all of one read in flight together ---- */

static void stripe_read(struct io_uring *ring, struct job *job, uint64_t offset, unsigned char *buffer) {
    const struct options *options = &job->options;
    static struct iovec pieces[DEVICES_MAX][PIECES_MAX];
    uint32_t counts[DEVICES_MAX] = {0};
    uint64_t starts[DEVICES_MAX] = {0}, sizes[DEVICES_MAX] = {0};
    uint64_t width = job->path_count;
    for (uint64_t done = 0; done < options->size;) {
        uint64_t at = offset + done, stripe = at / options->unit, inside = at % options->unit, device = stripe % width;
        uint64_t n = options->unit - inside;
        n = n < options->size - done ? n : options->size - done;
        if (counts[device] == 0)
            starts[device] = options->base + stripe / width * options->unit + inside;
        pieces[device][counts[device]++] = (struct iovec){buffer + done, n};
        sizes[device] += n;
        done += n;
    }
    unsigned submitted = 0;
    for (uint64_t device = 0; device < width; device++) {
        if (counts[device] == 0)
            continue;
        struct io_uring_sqe *sqe = io_uring_get_sqe(ring);
        if (!sqe)
            die("the submission queue is full");
        io_uring_prep_readv(sqe, (int)device, pieces[device], counts[device], starts[device]);
        sqe->flags |= IOSQE_FIXED_FILE;
        sqe->user_data = device;
        submitted++;
    }
    if (io_uring_submit_and_wait(ring, submitted) < 0)
        die("io_uring_submit failed");
    for (unsigned i = 0; i < submitted; i++) {
        struct io_uring_cqe *cqe;
        int r = io_uring_wait_cqe(ring, &cqe);
        if (r < 0)
            die("io_uring: %s", strerror(-r));
        uint64_t device = cqe->user_data;
        if (cqe->res < 0 || (uint64_t)cqe->res != sizes[device])
            die("%s: read: %s", job->paths[device], cqe->res < 0 ? strerror(-cqe->res) : "short");
        io_uring_cqe_seen(ring, cqe);
    }
}

static void command_stripe(struct job *job) {
    struct options *options = &job->options;
    read_list(job);
    open_all(job);
    uint64_t slots = options->span / options->size;
    if (job->path_count > DEVICES_MAX || options->unit == 0 || options->unit % PAGE || options->size / options->unit + 1 > PIECES_MAX || slots == 0)
        die("stripe: too many devices or pieces, or --unit or --span is missing");
    struct io_uring ring;
    int r = io_uring_queue_init(DEVICES_MAX, &ring, 0);
    if (r < 0)
        die("io_uring: %s", strerror(-r));
    r = io_uring_register_files(&ring, job->fds, (unsigned)job->path_count);
    if (r < 0)
        die("io_uring: registering files: %s", strerror(-r));
    unsigned char *buffer = allocate(options->size);
    uint64_t *latencies_ns = malloc(options->count * sizeof(*latencies_ns)), state = options->seed;
    if (!latencies_ns)
        die("no memory");
    stripe_read(&ring, job, 0, buffer);
    uint64_t digest = XXH3_64bits(buffer, options->size);
    struct rusage before;
    getrusage(RUSAGE_SELF, &before);
    uint64_t start = now_ns();
    for (uint64_t i = 0; i < options->count; i++) {
        uint64_t at = now_ns();
        stripe_read(&ring, job, random64(&state) % slots * options->size, buffer);
        latencies_ns[i] = now_ns() - at;
    }
    print_result("stripe", options, latencies_ns, options->count, options->count * options->size, now_ns() - start, &before, 0, digest);
    io_uring_queue_exit(&ring);
    free(latencies_ns);
    free(buffer);
}

/* ---- the command line ---- */

static const char usage[] =
    "usage: bench_client COMMAND [options]; the driver is `tools/bench`\n"
    "  read    --list F --size B    random reads of open files    stripe --list F --size B --unit B --span B  raw reads of a stripe\n"
    "  blocks  --list F --size B    open, read whole, close       write  --dir D --size B                     tmp, write, rename\n"
    "  open    --list F             open and close                stat   --dir D                              of names that are missing\n"
    "  access  --list F             faccessat in the list's order\n"
    "options: --count N --threads N --seed N --direct --digest --base B --span B --first N --modulo N --dirs N --prefix S --packable\n";

static uint64_t number(const char *text) {
    char *end;
    errno = 0;
    uint64_t value = strtoull(text, &end, 10);
    if (errno || end == text || *end)
        die("%s: not a number", text);
    return value;
}

int main(int argc, char **argv) {
    static const struct option longs[] = {
        {"list", 1, NULL, 'l'},     {"dir", 1, NULL, 'd'},  {"prefix", 1, NULL, 'p'}, {"size", 1, NULL, 's'},   {"count", 1, NULL, 'c'},
        {"base", 1, NULL, 'b'},     {"span", 1, NULL, 'n'}, {"first", 1, NULL, 'f'},  {"modulo", 1, NULL, 'm'}, {"unit", 1, NULL, 'u'},
        {"threads", 1, NULL, 't'},  {"dirs", 1, NULL, 'i'}, {"seed", 1, NULL, 'e'},   {"direct", 0, NULL, 'D'}, {"digest", 0, NULL, 'G'},
        {"packable", 0, NULL, 'P'}, {NULL, 0, NULL, 0},
    };
    static struct job job;
    struct options *options = &job.options;
    *options = (struct options){.prefix = "b", .size = PAGE, .count = 1, .threads = 1, .dirs = 16, .seed = 1};
    for (int option; (option = getopt_long(argc, argv, "", longs, NULL)) != -1;) {
        switch (option) {
        case 'l': options->list = optarg; break;
        case 'd': options->dir = optarg; break;
        case 'p': options->prefix = optarg; break;
        case 's': options->size = number(optarg); break;
        case 'c': options->count = number(optarg); break;
        case 'b': options->base = number(optarg); break;
        case 'n': options->span = number(optarg); break;
        case 'f': options->first = number(optarg); break;
        case 'm': options->modulo = number(optarg); break;
        case 'u': options->unit = number(optarg); break;
        case 't': options->threads = (uint32_t)number(optarg); break;
        case 'i': options->dirs = (uint32_t)number(optarg); break;
        case 'e': options->seed = (uint32_t)number(optarg); break;
        case 'D': options->direct = true; break;
        case 'G': options->digest = true; break;
        case 'P': options->packable = true; break;
        default: fputs(usage, stderr); return 2;
        }
    }
    if (optind + 1 != argc || options->threads == 0 || options->threads > THREADS_MAX || options->count == 0 || options->dirs == 0 ||
        options->size == 0 || options->size % PAGE) {
        fputs(usage, stderr);
        return 2;
    }
    const char *command = argv[optind];
    bool is_write = !strcmp(command, "write"), is_stat = !strcmp(command, "stat");
    if (is_write || is_stat ? !options->dir : !options->list) {
        fputs(usage, stderr);
        return 2;
    }
    if (is_write) {
        command_write(&job);
    } else if (is_stat) {
        job.operation = operation_stat;
        run(command, &job, 0);
    } else if (!strcmp(command, "read")) {
        command_read(&job);
    } else if (!strcmp(command, "blocks")) {
        command_blocks(&job);
    } else if (!strcmp(command, "stripe")) {
        command_stripe(&job);
    } else if (!strcmp(command, "open")) {
        read_list(&job);
        job.operation = operation_open;
        run(command, &job, 0);
    } else if (!strcmp(command, "access")) {
        read_list(&job);
        job.operation = operation_access;
        run(command, &job, 0);
    } else {
        fputs(usage, stderr);
        return 2;
    }
    return 0;
}
