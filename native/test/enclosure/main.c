/* The enclosure's command line, its namespaces, and the port it listens on. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <linux/fs.h>
#include <netdb.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "enclosure.h"

#define STOP_TIMEOUT_MS 5000

struct enclosure enclosure = {
    .options = {.host = "127.0.0.1",
                .port = NVME_TCP_PORT,
                .block_size = 4096,
                .queue_count = 64,
                .entries = 128,
                .in_capsule_size = 16384,
                .max_h2c_size = 1 << 20,
                .mdts = 10,
                .digests = NVME_DIGEST_HEADER | NVME_DIGEST_DATA,
                .success = true,
                .seed = 1},
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .changed = PTHREAD_COND_INITIALIZER,
    .generation = 1,
    .listen_fd = -1,
};
static int quit_fd; /* also: listen_fd has changed */

int64_t now_ns(void) {
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

void say(const char *format, ...) {
    char text[600];
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    fprintf(stderr, "nvme_tcp_target: %s\n", text);
}

static void look(void) {
    uint64_t one = 1;

    if (write(quit_fd, &one, sizeof(one)) < 0)
        say("eventfd: %s", strerror(errno));
}

void enclosure_quit(void) {
    pthread_mutex_lock(&enclosure.lock);
    enclosure.stopping = true;
    pthread_mutex_unlock(&enclosure.lock);
    look();
}

/* ---- namespaces ---- */

/* The same name, the same identity, on every start: FNV-1a, twice. */
static void make_nguid(struct backing *backing) {
    uint64_t hash = 14695981039346656037ull ^ backing->nsid;

    for (int half = 0; half < 2; half++) {
        for (const char *at = backing->subsystem->nqn; *at; at++)
            hash = (hash ^ (uint8_t)*at) * 1099511628211ull;
        memcpy(backing->nguid + 8 * half, &hash, sizeof(hash));
    }
}

static bool open_backing(struct backing *backing) {
    uint64_t size = 0;
    struct stat status;

    backing->fd = open(backing->path, O_RDWR | O_CLOEXEC);
    if (backing->fd < 0 || fstat(backing->fd, &status)) {
        say("%s: %s", backing->path, strerror(errno));
        return false;
    }
    backing->block_device = S_ISBLK(status.st_mode);
    if (!backing->block_device)
        size = (uint64_t)status.st_size;
    else if (ioctl(backing->fd, BLKGETSIZE64, &size)) {
        say("%s: %s", backing->path, strerror(errno));
        return false;
    }
    backing->size = size / enclosure.options.block_size * enclosure.options.block_size;
    if (!backing->size) {
        say("%s: %lu bytes are less than a block", backing->path, size);
        return false;
    }
    backing->map = mmap(NULL, backing->size, PROT_READ | PROT_WRITE, MAP_SHARED, backing->fd, 0);
    if (backing->map == MAP_FAILED) {
        say("%s: mmap: %s", backing->path, strerror(errno));
        return false;
    }
    make_nguid(backing);
    atomic_store(&backing->attached, true);
    return true;
}

/* NQN=PATH[,PATH...] */
static bool add_subsystem(char *text) {
    struct subsystem *subsystem = calloc(1, sizeof(*subsystem));
    char *paths = strchr(text, '='), *rest;

    if (paths == NULL || paths == text || paths - text > NVME_NQN_MAX || enclosure.subsystem_count + 1 == SUBSYSTEMS_MAX) {
        say("--subsystem %s: NQN=PATH[,PATH...], the NQN of 1 to %d bytes, at most %d of them", text, NVME_NQN_MAX, SUBSYSTEMS_MAX - 1);
        return false;
    }
    *paths++ = 0;
    strcpy(subsystem->nqn, text);
    for (char *path = strtok_r(paths, ",", &rest); path; path = strtok_r(NULL, ",", &rest)) {
        struct backing *backing = &subsystem->namespaces[subsystem->namespace_count];

        if (subsystem->namespace_count == NAMESPACES_MAX) {
            say("%s: more than %d namespaces", text, NAMESPACES_MAX);
            return false;
        }
        backing->path = path;
        backing->nsid = ++subsystem->namespace_count;
        backing->subsystem = subsystem;
        if (!open_backing(backing))
            return false;
    }
    enclosure.subsystems[enclosure.subsystem_count++] = subsystem;
    return true;
}

/* ---- listening ---- */

int listen_now(void) {
    struct addrinfo hints = {.ai_flags = AI_NUMERICHOST | AI_PASSIVE, .ai_socktype = SOCK_STREAM}, *address;
    struct sockaddr_storage bound;
    socklen_t bound_size = sizeof(bound);
    char port[8];
    int fd, on = 1, status = 0;

    pthread_mutex_lock(&enclosure.lock);
    if (enclosure.listen_fd >= 0)
        goto out;
    snprintf(port, sizeof(port), "%u", enclosure.options.port);
    if (getaddrinfo(enclosure.options.host, port, &hints, &address)) {
        status = -EADDRNOTAVAIL;
        goto out;
    }
    fd = socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) || bind(fd, address->ai_addr, address->ai_addrlen) || listen(fd, 256) ||
        getsockname(fd, (struct sockaddr *)&bound, &bound_size)) {
        status = -errno;
        if (fd >= 0)
            close(fd);
    } else {
        enclosure.options.port =
            ntohs(bound.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&bound)->sin6_port : ((struct sockaddr_in *)&bound)->sin_port);
        enclosure.listen_fd = fd;
    }
    freeaddrinfo(address);
out:
    pthread_mutex_unlock(&enclosure.lock);
    look();
    return status;
}

void listen_end(void) {
    pthread_mutex_lock(&enclosure.lock);
    if (enclosure.listen_fd >= 0) {
        shutdown(enclosure.listen_fd, SHUT_RDWR); /* a thread that polls it keeps it open, and connections would still be taken */
        close(enclosure.listen_fd);
    }
    enclosure.listen_fd = -1;
    pthread_mutex_unlock(&enclosure.lock);
    look();
}

static void accept_one(int listen_fd) {
    struct sockaddr_storage address;
    socklen_t size = sizeof(address);
    char host[64] = "?", port[8] = "?", peer[80];
    int fd = accept4(listen_fd, (struct sockaddr *)&address, &size, SOCK_CLOEXEC);

    if (fd < 0)
        return;
    getnameinfo((struct sockaddr *)&address, size, host, sizeof(host), port, sizeof(port), NI_NUMERICHOST | NI_NUMERICSERV);
    snprintf(peer, sizeof(peer), "%s:%s", host, port);
    connection_start(fd, peer);
}

static void *wait_signal(void *argument) {
    int number;

    sigwait(argument, &number);
    enclosure_quit();
    return NULL;
}

static void serve(void) {
    for (;;) {
        struct pollfd pollers[2] = {{quit_fd, POLLIN, 0}, {-1, POLLIN, 0}};
        uint64_t woken;
        bool stopping;

        pthread_mutex_lock(&enclosure.lock);
        pollers[1].fd = enclosure.listen_fd;
        stopping = enclosure.stopping;
        pthread_mutex_unlock(&enclosure.lock);
        if (stopping)
            return;
        poll(pollers, 2, -1);
        if (pollers[0].revents && read(quit_fd, &woken, sizeof(woken)) < 0)
            say("eventfd: %s", strerror(errno));
        else if (pollers[1].revents & POLLIN)
            accept_one(pollers[1].fd);
    }
}

/* Connections end, and with them what they had under way. */
static void stop(void) {
    struct timespec until;

    listen_end();
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += STOP_TIMEOUT_MS / 1000;
    pthread_mutex_lock(&enclosure.lock);
    for (struct connection *connection = enclosure.connections; connection; connection = connection->next)
        shutdown(connection->fd, SHUT_RDWR);
    while (enclosure.connection_count && pthread_cond_timedwait(&enclosure.changed, &enclosure.lock, &until) == 0)
        ;
    if (enclosure.connection_count)
        say("%u connections do not end", enclosure.connection_count);
    pthread_mutex_unlock(&enclosure.lock);
}

/* ---- the command line ---- */

static const char usage[] =
    "usage: nvme_tcp_target --subsystem NQN=PATH[,PATH...] [--subsystem ...] [option...]\n"
    "  --listen HOST:PORT    numeric; port 0: any free one; default 127.0.0.1:4420. \"listening HOST:PORT\" is said on stdout\n"
    "  --control PATH        a socket for faults and status: native/test/enclosure/control.c\n"
    "  --block-size N        512 to 4096, default 4096        --queues N          I/O queues a controller may have, default 64\n"
    "  --entries N           of a queue, default 128          --in-capsule N      bytes in a command's capsule, default 16384\n"
    "  --max-h2c-data N      bytes of an H2CData, default 1M  --mdts N            largest transfer 4096 << N, 0: any, default 10\n"
    "  --r2t-size N          bytes asked for at once          --c2h-size N        bytes of a C2HData; both: default all\n"
    "  --digest none|header|data|both   granted if the host asks, default both\n"
    "  --no-success          reads end with a response, not with their last data\n"
    "  --cpda N              the host's data begins at multiples of (N + 1) * 4\n"
    "  --seed N              of faults that come by chance     --verbose           says when connections come and go\n";

enum option_code {
    OPTION_SUBSYSTEM = 1,
    OPTION_LISTEN,
    OPTION_CONTROL,
    OPTION_BLOCK_SIZE,
    OPTION_QUEUES,
    OPTION_ENTRIES,
    OPTION_IN_CAPSULE,
    OPTION_H2C,
    OPTION_MDTS,
    OPTION_R2T,
    OPTION_C2H,
    OPTION_DIGEST,
    OPTION_NO_SUCCESS,
    OPTION_CPDA,
    OPTION_SEED,
    OPTION_VERBOSE
};

/* A number within bounds, and a multiple of `unit`. */
static bool number(const char *name, const char *text, uint64_t least, uint64_t most, uint64_t unit, uint32_t *value) {
    char *end;
    unsigned long long parsed = strtoull(text, &end, 10);

    if (!*text || *end || parsed < least || parsed > most || parsed % unit) {
        say("--%s %s: a multiple of %lu from %lu to %lu", name, text, unit, least, most);
        return false;
    }
    *value = (uint32_t)parsed;
    return true;
}

static bool parse_listen(const char *text) {
    const char *colon = strrchr(text, ':');
    uint32_t port = 0;
    size_t size = colon ? (size_t)(colon - text) : 0;

    if (size > 2 && *text == '[' && text[size - 1] == ']') {
        text++;
        size -= 2;
    }
    if (!size || size >= sizeof(enclosure.options.host)) {
        say("--listen %s: HOST:PORT", text);
        return false;
    }
    memcpy(enclosure.options.host, text, size);
    enclosure.options.host[size] = 0;
    if (!number("listen", colon + 1, 0, 65535, 1, &port))
        return false;
    enclosure.options.port = (uint16_t)port;
    return true;
}

static bool parse_digest(const char *text) {
    static const char *const names[] = {"none", "header", "data", "both"}; /* by enum nvme_digests */

    for (uint32_t i = 0; i < 4; i++)
        if (!strcmp(text, names[i])) {
            enclosure.options.digests = i;
            return true;
        }
    say("--digest %s: none, header, data or both", text);
    return false;
}

static bool parse(int argc, char **argv, const char **control, char **subsystems, uint32_t *count) {
    static const struct option names[] = {{"subsystem", 1, NULL, OPTION_SUBSYSTEM},
                                          {"listen", 1, NULL, OPTION_LISTEN},
                                          {"control", 1, NULL, OPTION_CONTROL},
                                          {"block-size", 1, NULL, OPTION_BLOCK_SIZE},
                                          {"queues", 1, NULL, OPTION_QUEUES},
                                          {"entries", 1, NULL, OPTION_ENTRIES},
                                          {"in-capsule", 1, NULL, OPTION_IN_CAPSULE},
                                          {"max-h2c-data", 1, NULL, OPTION_H2C},
                                          {"mdts", 1, NULL, OPTION_MDTS},
                                          {"r2t-size", 1, NULL, OPTION_R2T},
                                          {"c2h-size", 1, NULL, OPTION_C2H},
                                          {"digest", 1, NULL, OPTION_DIGEST},
                                          {"no-success", 0, NULL, OPTION_NO_SUCCESS},
                                          {"cpda", 1, NULL, OPTION_CPDA},
                                          {"seed", 1, NULL, OPTION_SEED},
                                          {"verbose", 0, NULL, OPTION_VERBOSE},
                                          {NULL, 0, NULL, 0}};
    struct options *options = &enclosure.options;
    uint32_t seed;
    bool ok = true;
    int code;

    while (ok && (code = getopt_long(argc, argv, "", names, NULL)) != -1)
        switch (code) {
        case OPTION_SUBSYSTEM:
            ok = *count < SUBSYSTEMS_MAX;
            if (ok)
                subsystems[(*count)++] = optarg;
            break;
        case OPTION_LISTEN: ok = parse_listen(optarg); break;
        case OPTION_CONTROL: *control = optarg; break;
        case OPTION_BLOCK_SIZE:
            ok = number("block-size", optarg, 512, 4096, 512, &options->block_size) && !(options->block_size & (options->block_size - 1));
            break;
        case OPTION_QUEUES: ok = number("queues", optarg, 1, 1024, 1, &options->queue_count); break;
        case OPTION_ENTRIES: ok = number("entries", optarg, 2, QUEUE_ENTRIES_MAX, 1, &options->entries); break;
        case OPTION_IN_CAPSULE: ok = number("in-capsule", optarg, 1024, 1 << 20, 16, &options->in_capsule_size); break;
        case OPTION_H2C: ok = number("max-h2c-data", optarg, 4096, 1 << 30, 4, &options->max_h2c_size); break;
        case OPTION_MDTS: ok = number("mdts", optarg, 0, 16, 1, &options->mdts); break;
        case OPTION_R2T: ok = number("r2t-size", optarg, 512, 1 << 30, 4, &options->r2t_size); break;
        case OPTION_C2H: ok = number("c2h-size", optarg, 512, 1 << 30, 4, &options->c2h_size); break;
        case OPTION_DIGEST: ok = parse_digest(optarg); break;
        case OPTION_NO_SUCCESS: options->success = false; break;
        case OPTION_CPDA: ok = number("cpda", optarg, 0, 31, 1, &options->cpda); break;
        case OPTION_SEED:
            ok = number("seed", optarg, 1, UINT32_MAX, 1, &seed);
            options->seed = seed;
            break;
        case OPTION_VERBOSE: options->verbose = true; break;
        default: ok = false; break;
        }
    return ok && optind == argc && *count;
}

int main(int argc, char **argv) {
    static struct subsystem discovery = {.nqn = NVME_DISCOVERY_NQN, .discovery = true};
    static char *subsystems[SUBSYSTEMS_MAX];
    static sigset_t signals;
    const char *control = NULL;
    struct rlimit files;
    uint32_t count = 0;
    pthread_t thread;
    int status;

    if (!parse(argc, argv, &control, subsystems, &count)) {
        fputs(usage, stderr);
        return 2;
    }
    /* Four thousand connections need twice that many descriptors. */
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    pthread_sigmask(SIG_BLOCK, &signals, NULL);
    signal(SIGPIPE, SIG_IGN);
    quit_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (quit_fd < 0 || pthread_create(&thread, NULL, wait_signal, &signals)) {
        say("cannot start: %s", strerror(errno));
        return 1;
    }
    for (uint32_t i = 0; i < count; i++)
        if (!add_subsystem(subsystems[i]))
            return 1;
    enclosure.subsystems[enclosure.subsystem_count++] = &discovery;
    status = listen_now();
    if (status) {
        say("%s:%u: %s", enclosure.options.host, enclosure.options.port, strerror(-status));
        return 1;
    }
    status = control ? control_start(control) : 0;
    if (status) {
        say("%s: %s", control, strerror(-status));
        return 1;
    }
    printf("listening %s:%u\n", enclosure.options.host, enclosure.options.port);
    fflush(stdout);
    serve();
    stop();
    if (control)
        unlink(control);
    return 0;
}
