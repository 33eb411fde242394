/* The load of `tools/bench` on a virtio-fs back end, without a guest: vhost_fuse with commands on stdin, one JSON line for each on stdout.
 *
 *     virtiofs_client SOCKET
 *     read-4k PATH DEPTH SECONDS      read-1m, read-4m: O_DIRECT reads at random places of one file
 *     store-2m DIRECTORY DEPTH SECONDS[ COUNT]    create a temporary name, write 2 MiB, flush, release, rename; at most COUNT
 *     copy PATH FILE                  a whole file into one here
 *
 * Memory is a memfd in pages of 4 KiB, and each of them has a descriptor of its own, as Linux's driver gives them. The program sleeps while it waits,
 * as a guest does. It ends with its stdin, and with status 1 at the first error. */
#define _GNU_SOURCE
#include "bench_common.h"
#include "vhost_fuse.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/fuse.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

static const char program[] = "virtiofs_client";

#define MIB ((uint64_t)1 << 20)
#define QUEUE_SIZE 1024u
#define TIMEOUT_MS 30000u
#define DEPTH_MAX 32u
#define PARTS_MAX 4u   /* requests of one operation: Linux asks for 1 MiB at most */
#define BODY_MAX 4096u /* of a request besides payload: names and structs */
#define STORE_SIZE (2 * MIB)
#define STORE_NAMES 64u /* stored again and again */

struct client {
    struct vhost_fuse *vhost;
    uint8_t *memory;
    uint64_t memory_size, unique;
};

/* One request at a time: its buffers in shared memory. */
struct part {
    struct client *client;
    struct lane *lane;
    struct fuse_in_header *in;
    uint8_t *body; /* after it, in a page of its own */
    struct fuse_out_header *out;
    uint8_t *answer;
    uint8_t *data; /* 1 MiB */
    int32_t result;
    bool done;
};

/* One operation at a time. */
struct lane {
    struct part parts[PARTS_MAX];
    struct load *load;
    uint64_t started_ns, number, node, handle;
    uint32_t step, left;
};

/* One run of a case. */
struct load {
    struct client *client;
    uint64_t node, handle, file_size, size, parent, operations_max;
    uint64_t started_ns, until_ns, operations, begun, random;
    uint64_t *latencies, latency_room;
    uint32_t active;
};

static struct lane lanes[DEPTH_MAX];
static struct part control; /* for requests that nothing runs beside */

/* ---- requests ---- */

static void part_make(struct client *client, struct part *part, struct lane *lane, uint8_t **at) {
    *part = (struct part){.client = client, .lane = lane, .in = (void *)*at, .body = *at + PAGE, .out = (void *)(*at + 2 * PAGE)};
    part->answer = *at + 3 * PAGE;
    part->data = *at + 4 * PAGE;
    *at = part->data + MIB;
}

static void memory_make(struct client *client, struct vhost_fuse_region *region) {
    client->memory_size = (DEPTH_MAX * PARTS_MAX + 1) * (4 * PAGE + MIB);
    int fd = memfd_create("virtiofs-client", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)client->memory_size) < 0)
        die("memfd of %" PRIu64 " bytes: %s", client->memory_size, strerror(errno));
    void *map = mmap(NULL, client->memory_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED)
        die("mmap of %" PRIu64 " bytes: %s", client->memory_size, strerror(errno));
    client->memory = map;
    *region = (struct vhost_fuse_region){fd, map, client->memory_size, 0};
    uint8_t *at = map;
    part_make(client, &control, NULL, &at);
    for (uint32_t i = 0; i < DEPTH_MAX; i++)
        for (uint32_t j = 0; j < PARTS_MAX; j++)
            part_make(client, &lanes[i].parts[j], &lanes[i], &at);
}

/* Pages of data as pieces, each by itself. */
static uint32_t pieces(struct iovec *iovs, uint8_t *data, uint64_t size) {
    uint32_t count = 0;
    for (uint64_t at = 0; at < size; at += PAGE)
        iovs[count++] = (struct iovec){data + at, size - at < PAGE ? size - at : PAGE};
    return count;
}

static void lane_go_on(struct part *part, int32_t result);

static void part_done(void *context, int32_t result) {
    struct part *part = context;
    part->result = result;
    part->done = true;
    if (part->lane)
        lane_go_on(part, result);
}

/* A request with `body` bytes in part->body and `data_out` of payload; room for `answer` bytes in part->answer and for `data_in` of payload. */
static void part_submit(struct part *part, uint32_t opcode, uint64_t node, uint32_t body, uint64_t data_out, uint32_t answer, uint64_t data_in) {
    struct client *client = part->client;
    struct iovec out[2 + MIB / PAGE], in[2 + MIB / PAGE];
    bool forgets = opcode == FUSE_FORGET;
    uint32_t out_count = 0, in_count = 0;
    *part->in = (struct fuse_in_header){
        .len = (uint32_t)(sizeof(*part->in) + body + data_out), .opcode = opcode, .unique = ++client->unique, .nodeid = node, .pid = 1};
    out[out_count++] = (struct iovec){part->in, sizeof(*part->in)};
    if (body)
        out[out_count++] = (struct iovec){part->body, body};
    out_count += pieces(out + out_count, part->data, data_out);
    if (!forgets)
        in[in_count++] = (struct iovec){part->out, sizeof(*part->out)};
    if (answer)
        in[in_count++] = (struct iovec){part->answer, answer};
    in_count += pieces(in + in_count, part->data, data_in);
    part->done = false;
    int r = vhost_fuse_submit(client->vhost, forgets ? VHOST_FUSE_PRIORITY : VHOST_FUSE_REQUESTS, out, out_count, in, in_count, part_done, part);
    if (r < 0)
        die("opcode %u: %s%s%s", opcode, strerror(-r), r == -EPIPE ? ": " : "", vhost_fuse_error(client->vhost));
}

static void poll_once(struct client *client) {
    int r = vhost_fuse_poll(client->vhost);
    if (r < 0)
        die("%s", vhost_fuse_error(client->vhost));
    if (r == 0)
        vhost_fuse_wait(client->vhost, 100);
}

/* A request by itself; its result is a size, and an error ends the program. */
static uint32_t ask(struct part *part, const char *what, uint32_t opcode, uint64_t node, uint32_t body, uint32_t answer, uint64_t data_in) {
    part_submit(part, opcode, node, body, 0, answer, data_in);
    while (!part->done)
        poll_once(part->client);
    if (part->result < 0)
        die("%s: %s", what, strerror(-part->result));
    if (data_in == 0 && (uint32_t)part->result != answer)
        die("%s: an answer of %d bytes, expected %u", what, part->result, answer);
    return (uint32_t)part->result;
}

static uint32_t name_put(uint8_t *at, const char *name) {
    uint32_t size = (uint32_t)strlen(name) + 1;
    if (size > 256)
        die("%s: a name of %u bytes", name, size - 1);
    memcpy(at, name, size);
    return size;
}

static void init(struct client *client) {
    struct fuse_init_in *in = (void *)control.body;
    const struct fuse_init_out *out = (const void *)control.answer;
    *in = (struct fuse_init_in){.major = FUSE_KERNEL_VERSION, .minor = FUSE_KERNEL_MINOR_VERSION, .max_readahead = 1 << 20};
    in->flags = FUSE_ASYNC_READ | FUSE_BIG_WRITES | FUSE_MAX_PAGES | FUSE_ATOMIC_O_TRUNC;
    control.client = client;
    ask(&control, "INIT", FUSE_INIT, 0, sizeof(*in), sizeof(*out), 0);
    if (out->major != FUSE_KERNEL_VERSION || out->minor < 28 || out->max_write < MIB)
        die("INIT: version %u.%u, writes of at most %u bytes; needs 7.28 and 1 MiB", out->major, out->minor, out->max_write);
}

/* The node of a path of names. */
static struct fuse_entry_out lookup(const char *path) {
    struct fuse_entry_out entry = {.nodeid = FUSE_ROOT_ID};
    char copy[PATH_MAX], *rest = copy, *name;
    if (snprintf(copy, sizeof(copy), "%s", path) >= (int)sizeof(copy))
        die("a path of %zu bytes", strlen(path));
    while ((name = strsep(&rest, "/")))
        if (*name && strcmp(name, ".")) {
            ask(&control, path, FUSE_LOOKUP, entry.nodeid, name_put(control.body, name), sizeof(entry), 0);
            memcpy(&entry, control.answer, sizeof(entry));
            if (entry.nodeid == 0)
                die("%s: %s", path, strerror(ENOENT));
        }
    return entry;
}

static uint64_t open_file(const char *path, uint64_t node) {
    struct fuse_open_out out;
    *(struct fuse_open_in *)(void *)control.body = (struct fuse_open_in){.flags = O_RDONLY | O_DIRECT};
    ask(&control, path, FUSE_OPEN, node, sizeof(struct fuse_open_in), sizeof(out), 0);
    memcpy(&out, control.answer, sizeof(out));
    return out.fh;
}

static uint32_t release_put(struct part *part, uint64_t handle, uint32_t flags) {
    *(struct fuse_release_in *)(void *)part->body = (struct fuse_release_in){.fh = handle, .flags = flags};
    return sizeof(struct fuse_release_in);
}

static uint32_t read_put(struct part *part, uint64_t handle, uint64_t offset, uint32_t size) {
    *(struct fuse_read_in *)(void *)part->body = (struct fuse_read_in){.fh = handle, .offset = offset, .size = size, .flags = O_RDONLY | O_DIRECT};
    return sizeof(struct fuse_read_in);
}

/* ---- loads ---- */

static void expect(const struct part *part, const char *what, int32_t result, uint64_t size) {
    if (result < 0)
        die("%s: %s", what, strerror(-result));
    if ((uint64_t)result != size)
        die("%s of request %" PRIu64 ": %d bytes, expected %" PRIu64, what, (uint64_t)part->in->unique, result, size);
}

static void read_begin(struct lane *lane) {
    struct load *load = lane->load;
    uint64_t offset = random64(&load->random) % (load->file_size / load->size) * load->size;
    uint64_t each = load->size < MIB ? load->size : MIB;
    lane->left = (uint32_t)(load->size / each);
    for (uint32_t i = 0; i < load->size / each; i++) {
        struct part *part = &lane->parts[i];
        part_submit(part, FUSE_READ, load->node, read_put(part, load->handle, offset + i * each, (uint32_t)each), 0, 0, each);
    }
}

static bool read_step(struct lane *lane, const struct part *part, int32_t result) {
    expect(part, "READ", result, lane->load->size < MIB ? lane->load->size : MIB);
    return --lane->left == 0;
}

/* The steps of a store. */
enum { CREATE, WRITE_FIRST, WRITE_SECOND, FLUSH, RELEASE, RENAME, FORGET };

static uint32_t temporary_put(uint8_t *at, uint64_t number) {
    char name[64];
    snprintf(name, sizeof(name), "block-%" PRIu64 ".tmp", number);
    return name_put(at, name);
}

static void store_ask(struct lane *lane) {
    struct load *load = lane->load;
    struct part *part = &lane->parts[lane->step == WRITE_SECOND]; /* its data is the second half of the block */
    uint8_t *body = part->body;
    char name[64];
    uint32_t size;
    switch (lane->step) {
    case CREATE:
        *(struct fuse_create_in *)(void *)body = (struct fuse_create_in){.flags = O_CREAT | O_EXCL | O_WRONLY | O_DIRECT, .mode = S_IFREG | 0644};
        size = (uint32_t)sizeof(struct fuse_create_in) + temporary_put(body + sizeof(struct fuse_create_in), lane->number);
        part_submit(part, FUSE_CREATE, load->parent, size, 0, sizeof(struct fuse_entry_out) + sizeof(struct fuse_open_out), 0);
        break;
    case WRITE_FIRST:
    case WRITE_SECOND:
        *(struct fuse_write_in *)(void *)body = (struct fuse_write_in){
            .fh = lane->handle, .offset = lane->step == WRITE_SECOND ? MIB : 0, .size = (uint32_t)MIB, .flags = O_WRONLY | O_DIRECT};
        part_submit(part, FUSE_WRITE, lane->node, sizeof(struct fuse_write_in), MIB, sizeof(struct fuse_write_out), 0);
        break;
    case FLUSH:
        *(struct fuse_flush_in *)(void *)body = (struct fuse_flush_in){.fh = lane->handle};
        part_submit(part, FUSE_FLUSH, lane->node, sizeof(struct fuse_flush_in), 0, 0, 0);
        break;
    case RELEASE: part_submit(part, FUSE_RELEASE, lane->node, release_put(part, lane->handle, O_WRONLY | O_DIRECT), 0, 0, 0); break;
    case RENAME:
        *(struct fuse_rename_in *)(void *)body = (struct fuse_rename_in){.newdir = load->parent};
        size = (uint32_t)sizeof(struct fuse_rename_in);
        size += temporary_put(body + size, lane->number);
        snprintf(name, sizeof(name), "block-%" PRIu64, lane->number % STORE_NAMES);
        size += name_put(body + size, name);
        part_submit(part, FUSE_RENAME, load->parent, size, 0, 0, 0);
        break;
    default: /* FORGET, so that what a later rename replaces can go */
        *(struct fuse_forget_in *)(void *)body = (struct fuse_forget_in){.nlookup = 1};
        part_submit(part, FUSE_FORGET, lane->node, sizeof(struct fuse_forget_in), 0, 0, 0);
    }
}

static void store_begin(struct lane *lane) {
    lane->step = CREATE;
    for (uint32_t half = 0; half < 2; half++)
        content_stamp(lane->parts[half].data, MIB, 2 * lane->number + half);
    store_ask(lane);
}

static bool store_step(struct lane *lane, const struct part *part, int32_t result) {
    static const char *const names[] = {"CREATE", "WRITE", "WRITE", "FLUSH", "RELEASE", "RENAME", "FORGET"};
    static const uint64_t sizes[] = {sizeof(struct fuse_entry_out) + sizeof(struct fuse_open_out), sizeof(struct fuse_write_out),
                                     sizeof(struct fuse_write_out)};
    expect(part, names[lane->step], result, lane->step <= WRITE_SECOND ? sizes[lane->step] : 0);
    if (lane->step == CREATE) {
        const struct fuse_entry_out *entry = (const void *)part->answer;
        const struct fuse_open_out *open = (const void *)(part->answer + sizeof(*entry));
        lane->node = entry->nodeid;
        lane->handle = open->fh;
    } else if (lane->step == WRITE_FIRST || lane->step == WRITE_SECOND) {
        const struct fuse_write_out *written = (const void *)part->answer;
        if (written->size != MIB)
            die("WRITE of %" PRIu64 " bytes: %u written", MIB, written->size);
    }
    if (lane->step == FORGET)
        return true;
    lane->step++;
    store_ask(lane);
    return false;
}

static void lane_begin(struct lane *lane) {
    struct load *load = lane->load;
    if (load->begun == load->operations_max)
        return;
    lane->number = load->begun++;
    lane->started_ns = now_ns();
    load->active++;
    if (load->parent)
        store_begin(lane);
    else
        read_begin(lane);
}

static void lane_go_on(struct part *part, int32_t result) {
    struct lane *lane = part->lane;
    struct load *load = lane->load;
    if (!(load->parent ? store_step(lane, part, result) : read_step(lane, part, result)))
        return;
    uint64_t now = now_ns();
    if (load->operations == load->latency_room) {
        load->latency_room = load->latency_room ? 2 * load->latency_room : 4096;
        load->latencies = realloc(load->latencies, load->latency_room * sizeof(*load->latencies));
        if (!load->latencies)
            die("no memory for %" PRIu64 " latencies", load->latency_room);
    }
    load->latencies[load->operations++] = now - lane->started_ns;
    load->active--;
    if (now < load->until_ns)
        lane_begin(lane);
}

static void load_report(const char *name, struct load *load, double seconds) {
    uint64_t count = load->operations, total = 0;
    struct rusage used;
    if (count == 0)
        die("%s: no operation was done", name);
    qsort(load->latencies, count, sizeof(*load->latencies), by_value);
    for (uint64_t i = 0; i < count; i++)
        total += load->latencies[i];
    getrusage(RUSAGE_SELF, &used);
    printf("{\"case\": \"%s\", \"operations\": %" PRIu64 ", \"bytes\": %" PRIu64 ", \"seconds\": %.6f, ", name, count, count * load->size, seconds);
    printf("\"latency_us\": {\"mean\": %.3f, \"p50\": %.3f, \"p99\": %.3f}, ", (double)total / (double)count / 1e3,
           (double)load->latencies[count / 2] / 1e3, (double)load->latencies[count - 1 - count / 100] / 1e3);
    printf("\"cpu_s\": {\"user\": %.6f, \"system\": %.6f}}\n", seconds_of(used.ru_utime), seconds_of(used.ru_stime));
}

static void load_run(const char *name, struct load *load, uint32_t depth, double seconds) {
    load->random = 1;
    load->started_ns = now_ns();
    load->until_ns = load->started_ns + (uint64_t)(seconds * 1e9);
    for (uint32_t i = 0; i < depth; i++) {
        lanes[i].load = load;
        lane_begin(&lanes[i]);
    }
    while (load->active)
        poll_once(load->client);
    load_report(name, load, (double)(now_ns() - load->started_ns) / 1e9);
    free(load->latencies);
}

static void read_case(struct client *client, const char *name, uint64_t size, const char *path, uint32_t depth, double seconds) {
    struct fuse_entry_out entry = lookup(path);
    struct load load = {.client = client, .node = entry.nodeid, .file_size = entry.attr.size, .size = size, .operations_max = UINT64_MAX};
    if (entry.attr.size < size)
        die("%s: %" PRIu64 " bytes, needs %" PRIu64, path, (uint64_t)entry.attr.size, size);
    load.handle = open_file(path, entry.nodeid);
    load_run(name, &load, depth, seconds);
    ask(&control, path, FUSE_RELEASE, entry.nodeid, release_put(&control, load.handle, O_RDONLY | O_DIRECT), 0, 0);
}

static void store_case(struct client *client, const char *name, const char *path, uint32_t depth, double seconds, uint64_t count) {
    struct load load = {.client = client, .parent = lookup(path).nodeid, .size = STORE_SIZE, .operations_max = count};
    for (uint32_t i = 0; i < depth; i++)
        for (uint32_t half = 0; half < 2; half++)
            content_make(lanes[i].parts[half].data, MIB, 1 + half, false);
    load_run(name, &load, depth, seconds);
}

static void copy_case(const char *path, const char *to) {
    struct fuse_entry_out entry = lookup(path);
    uint64_t handle = open_file(path, entry.nodeid), at = 0;
    FILE *file = fopen(to, "we");
    if (!file)
        die("%s: %s", to, strerror(errno));
    while (at < entry.attr.size) {
        uint32_t got = ask(&control, path, FUSE_READ, entry.nodeid, read_put(&control, handle, at, (uint32_t)MIB), 0, MIB);
        if (got == 0 || fwrite(control.data, 1, got, file) != got)
            die("%s at %" PRIu64 ": %u bytes read, of %" PRIu64 "; or %s is not writable", path, at, got, (uint64_t)entry.attr.size, to);
        at += got;
    }
    if (fclose(file))
        die("%s: %s", to, strerror(errno));
    ask(&control, path, FUSE_RELEASE, entry.nodeid, release_put(&control, handle, O_RDONLY | O_DIRECT), 0, 0);
    printf("{\"case\": \"copy\", \"bytes\": %" PRIu64 "}\n", at);
}

static void command(struct client *client, const char *line) {
    static const struct {
        const char *name;
        uint64_t size;
    } reads[] = {{"read-4k", PAGE}, {"read-1m", MIB}, {"read-4m", 4 * MIB}};
    char name[16], path[PATH_MAX], to[PATH_MAX];
    uint32_t depth;
    double seconds;
    uint64_t count = UINT64_MAX;
    if (sscanf(line, "copy %4095s %4095s", path, to) == 2) {
        copy_case(path, to);
        return;
    }
    if (sscanf(line, "%15s %4095s %u %lf %" SCNu64, name, path, &depth, &seconds, &count) < 4 || depth == 0 || depth > DEPTH_MAX ||
        !(seconds > 0 && seconds < 3600))
        die("%s: no command; depth is 1 to %u, seconds 0 to 3600", line, DEPTH_MAX);
    for (uint32_t i = 0; i < sizeof(reads) / sizeof(reads[0]); i++)
        if (strcmp(name, reads[i].name) == 0) {
            read_case(client, name, reads[i].size, path, depth, seconds);
            return;
        }
    if (strcmp(name, "store-2m"))
        die("%s: no case; read-4k, read-1m, read-4m, store-2m, copy are", name);
    store_case(client, name, path, depth, seconds, count);
}

int main(int argc, char **argv) {
    static char line[3 * PATH_MAX];
    struct client client = {0};
    struct vhost_fuse_region region;
    if (argc != 2) {
        fprintf(stderr, "usage: virtiofs_client SOCKET < COMMANDS\n");
        return 2;
    }
    memory_make(&client, &region);
    struct vhost_fuse_config config = {.path = argv[1], .queue_size = QUEUE_SIZE, .timeout_ms = TIMEOUT_MS, .regions = &region, .region_count = 1};
    int r = vhost_fuse_connect(&config, &client.vhost);
    if (r < 0)
        die("%s", client.vhost ? vhost_fuse_error(client.vhost) : strerror(-r));
    init(&client);
    while (fgets(line, sizeof(line), stdin)) { /* as long as its caller likes */
        line[strcspn(line, "\n")] = 0;
        command(&client, line);
        fflush(stdout);
    }
    vhost_fuse_close(client.vhost);
    return 0;
}
