/* Faults to come: rules, each for some commands of some queues, and a share or a number of them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "enclosure.h"

#define FAULTS_MAX 64
/* The device that `slow` multiplies. */
#define SLOW_COMMAND_NS 20000
#define SLOW_BYTES_PER_NS 2

struct fault {
    uint32_t id;
    enum fault_kind kind;
    enum fault_what what;
    char subsystem[NVME_NQN_SIZE]; /* empty: any */
    uint32_t nsid;                 /* 0: any */
    int32_t queue;                 /* -1: any, -2: any but the admin queue */
    uint32_t classes;
    int64_t left;  /* -1: until cleared */
    uint64_t skip; /* commands first */
    double share;
    int64_t delay_ns;
    uint32_t factor;
    uint16_t status;
    int64_t at;
    uint64_t hits;
    int64_t busy_ns; /* SLOW: when the device is free again */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct fault faults[FAULTS_MAX];
static uint32_t fault_count, last_id;
static uint64_t random_state;
/* Read without the lock: none, the common case, costs nothing. */
static _Atomic uint32_t command_faults, silences;

struct word {
    const char *word;
    uint32_t value;
};
static const struct word kinds[] = {{"delay", FAULT_DELAY},
                                    {"drop", FAULT_DROP},
                                    {"reset", FAULT_RESET},
                                    {"digest", FAULT_DIGEST},
                                    {"status", FAULT_STATUS},
                                    {"flip", FAULT_FLIP},
                                    {"half", FAULT_HALF},
                                    {"silence", FAULT_SILENCE},
                                    {"slow", FAULT_SLOW},
                                    {"protocol", FAULT_PROTOCOL},
                                    {NULL, 0}};
static const struct word whats[] = {{"command", WHAT_COMMAND}, {"answer", WHAT_ANSWER}, {"header", WHAT_HEADER},
                                    {"data", WHAT_DATA},       {"type", WHAT_TYPE},     {"hlen", WHAT_HLEN},
                                    {"plen", WHAT_PLEN},       {"pdo", WHAT_PDO},       {"cid", WHAT_CID},
                                    {"offset", WHAT_OFFSET},   {"size", WHAT_SIZE},     {"short", WHAT_SHORT},
                                    {"twice", WHAT_TWICE},     {"r2t", WHAT_R2T},       {"term", WHAT_TERM},
                                    {"flags", WHAT_FLAGS},     {"icresp", WHAT_ICRESP}, {"c2h", WHAT_C2H},
                                    {"pfv", WHAT_PFV},         {"cpda", WHAT_CPDA},     {"maxh2cdata", WHAT_MAXH2CDATA},
                                    {"digests", WHAT_DIGESTS}, {"close", WHAT_CLOSE},   {"hang", WHAT_HANG},
                                    {"media", WHAT_MEDIA},     {"wire", WHAT_WIRE},     {NULL, 0}};
static const struct word classes[] = {{"icreq", CLASS_ICREQ},
                                      {"connect", CLASS_CONNECT},
                                      {"property", CLASS_PROPERTY},
                                      {"identify", CLASS_IDENTIFY},
                                      {"features", CLASS_FEATURES},
                                      {"log", CLASS_LOG},
                                      {"keepalive", CLASS_KEEP_ALIVE},
                                      {"abort", CLASS_ABORT},
                                      {"read", CLASS_READ},
                                      {"write", CLASS_WRITE},
                                      {"flush", CLASS_FLUSH},
                                      {"dataset", CLASS_DATASET},
                                      {"zeroes", CLASS_ZEROES},
                                      {"io", CLASS_IO},
                                      {"any", CLASS_ANY},
                                      {NULL, 0}};

/* splitmix64 */
static uint64_t next_random(void) {
    uint64_t x = random_state += 0x9e3779b97f4a7c15ull;

    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

static bool concerns(const struct fault *fault, const struct connection *connection) {
    if (fault->subsystem[0] && (connection->subsystem == NULL || strcmp(fault->subsystem, connection->subsystem->nqn)))
        return false;
    return fault->queue == -1 || (fault->queue == -2 ? connection->qid != 0 : connection->qid == fault->queue);
}

static void count_active(void) {
    uint32_t commands = 0, silent = 0;

    for (uint32_t i = 0; i < fault_count; i++)
        if (faults[i].kind == FAULT_SILENCE)
            silent++;
        else if (faults[i].left)
            commands++;
    atomic_store(&command_faults, commands);
    atomic_store(&silences, silent);
}

bool fault_hits(const struct connection *connection, uint32_t nsid, enum command_class class, uint32_t size, struct fault_hit *hit) {
    bool found = false;

    if (!atomic_load_explicit(&command_faults, memory_order_relaxed))
        return false;
    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < fault_count && !found; i++) {
        struct fault *fault = &faults[i];

        if (fault->kind == FAULT_SILENCE || fault->left == 0 || !(fault->classes & class) || (fault->nsid && fault->nsid != nsid) ||
            !concerns(fault, connection))
            continue;
        if (fault->skip) {
            fault->skip--;
            continue;
        }
        if (fault->share < 1 && (double)(next_random() >> 11) >= fault->share * 0x1p53)
            continue;
        found = true;
        fault->hits++;
        if (fault->left > 0 && --fault->left == 0)
            count_active();
        *hit = (struct fault_hit){
            .kind = fault->kind, .what = fault->what, .status = fault->status, .delay_ns = fault->delay_ns, .at = fault->at, .random = next_random()};
        if (fault->kind == FAULT_SLOW) {
            int64_t now = now_ns(), start = fault->busy_ns > now ? fault->busy_ns : now;

            fault->busy_ns = start + (int64_t)fault->factor * (SLOW_COMMAND_NS + size / SLOW_BYTES_PER_NS);
            hit->delay_ns = fault->busy_ns - now;
        }
    }
    pthread_mutex_unlock(&lock);
    return found;
}

bool fault_silent(const struct connection *connection) {
    bool silent = false;

    if (!atomic_load_explicit(&silences, memory_order_relaxed))
        return false;
    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < fault_count && !silent; i++)
        silent = faults[i].kind == FAULT_SILENCE && concerns(&faults[i], connection);
    pthread_mutex_unlock(&lock);
    return silent;
}

/* ---- the control socket's words ---- */

static const char *word_of(const struct word *words, uint32_t value) {
    for (; words->word; words++)
        if (words->value == value)
            return words->word;
    return "";
}

static bool find_word(const struct word *words, const char *text, uint32_t *value) {
    for (; words->word; words++)
        if (!strcmp(words->word, text)) {
            *value = words->value;
            return true;
        }
    return false;
}

static bool parse_classes(char *text, uint32_t *value) {
    char *rest;
    uint32_t one;

    *value = 0;
    for (char *word = strtok_r(text, ",", &rest); word; word = strtok_r(NULL, ",", &rest)) {
        if (!find_word(classes, word, &one))
            return false;
        *value |= one;
    }
    return *value != 0;
}

static bool parse_number(const char *text, double least, double most, double *value) {
    char *end;

    *value = strtod(text, &end);
    if (strncmp(text, "0x", 2) == 0)
        *value = (double)strtoull(text, &end, 16);
    return *text && !*end && *value >= least && *value <= most;
}

static bool parse_option(struct fault *fault, char *option) {
    char *value = strchr(option, '=');
    double number;
    uint32_t word;

    if (value == NULL)
        return false;
    *value++ = 0;
    if (!strcmp(option, "what")) {
        if (!find_word(whats, value, &word))
            return false;
        fault->what = (enum fault_what)word;
    } else if (!strcmp(option, "op")) {
        return parse_classes(value, &fault->classes);
    } else if (!strcmp(option, "subsystem")) {
        if (!*value || strlen(value) >= sizeof(fault->subsystem))
            return false;
        strcpy(fault->subsystem, value);
    } else if (!strcmp(option, "queue") && !strcmp(value, "io")) {
        fault->queue = -2;
    } else if (!strcmp(option, "queue") && !strcmp(value, "admin")) {
        fault->queue = 0;
    } else if (!strcmp(option, "queue") && parse_number(value, 0, 65535, &number)) {
        fault->queue = (int32_t)number;
    } else if (!strcmp(option, "namespace") && parse_number(value, 1, NAMESPACES_MAX, &number)) {
        fault->nsid = (uint32_t)number;
    } else if (!strcmp(option, "count") && parse_number(value, 1, 1e15, &number)) {
        fault->left = (int64_t)number;
    } else if (!strcmp(option, "skip") && parse_number(value, 0, 1e15, &number)) {
        fault->skip = (uint64_t)number;
    } else if (!strcmp(option, "share") && parse_number(value, 0, 1, &number)) {
        fault->share = number;
    } else if (!strcmp(option, "ms") && parse_number(value, 0, 1e9, &number)) {
        fault->delay_ns = (int64_t)(number * 1e6);
    } else if (!strcmp(option, "factor") && parse_number(value, 1, 1e6, &number)) {
        fault->factor = (uint32_t)number;
    } else if (!strcmp(option, "status") && parse_number(value, 1, 0x7fff, &number)) {
        fault->status = (uint16_t)number;
    } else if (!strcmp(option, "at") && parse_number(value, 0, 1e15, &number)) {
        fault->at = (int64_t)number;
    } else {
        return false;
    }
    return true;
}

static bool add(char *words, char *answer, size_t answer_size) {
    struct fault fault = {.queue = -1, .left = -1, .share = 1, .at = -1, .delay_ns = 100000000, .factor = 10, .status = NVME_SC_INTERNAL};
    char *rest, *kind = strtok_r(words, " ", &rest);
    uint32_t value = 0;

    if (kind == NULL || !find_word(kinds, kind, &value)) {
        snprintf(answer, answer_size, "no fault of the kind %s", kind ? kind : "''");
        return false;
    }
    fault.kind = (enum fault_kind)value;
    fault.classes = fault.kind == FAULT_FLIP ? CLASS_READ : CLASS_IO;
    for (char *option = strtok_r(NULL, " ", &rest); option; option = strtok_r(NULL, " ", &rest))
        if (!parse_option(&fault, option)) {
            snprintf(answer, answer_size, "what is %s?", option);
            return false;
        }
    if (fault.kind == FAULT_PROTOCOL && !fault.what)
        fault.what = WHAT_TYPE;
    pthread_mutex_lock(&lock);
    if (fault_count < FAULTS_MAX) {
        if (!random_state)
            random_state = enclosure.options.seed;
        fault.id = ++last_id;
        faults[fault_count++] = fault;
        count_active();
        snprintf(answer, answer_size, "\"fault\": %u", fault.id);
        fault.kind = FAULT_NONE;
    } else {
        snprintf(answer, answer_size, "%u faults are set, and no more can be", FAULTS_MAX);
    }
    pthread_mutex_unlock(&lock);
    return fault.kind == FAULT_NONE;
}

static bool clear(char *words, char *answer, size_t answer_size) {
    uint32_t id = *words ? (uint32_t)strtoul(words, NULL, 10) : 0, kept = 0, before;

    pthread_mutex_lock(&lock);
    before = fault_count;
    for (uint32_t i = 0; i < fault_count; i++)
        if (id && faults[i].id != id)
            faults[kept++] = faults[i];
    fault_count = kept;
    count_active();
    snprintf(answer, answer_size, "\"cleared\": %u", before - kept);
    pthread_mutex_unlock(&lock);
    return true;
}

static bool list(char *answer, size_t answer_size) {
    size_t used = (size_t)snprintf(answer, answer_size, "\"faults\": [");

    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < fault_count && used < answer_size; i++)
        used += (size_t)snprintf(answer + used, answer_size - used,
                                 "%s{\"id\": %u, \"kind\": \"%s\", \"what\": \"%s\", \"hits\": %lu, \"left\": %ld}", i ? ", " : "", faults[i].id,
                                 word_of(kinds, faults[i].kind), word_of(whats, faults[i].what), faults[i].hits, faults[i].left);
    pthread_mutex_unlock(&lock);
    if (used < answer_size)
        snprintf(answer + used, answer_size - used, "]");
    return true;
}

bool fault_control(char *line, char *answer, size_t answer_size) {
    if (!strncmp(line, "fault ", 6))
        return add(line + 6, answer, answer_size);
    if (!strncmp(line, "clear", 5) && (!line[5] || line[5] == ' '))
        return clear(line + 5 + (line[5] == ' '), answer, answer_size);
    if (!strcmp(line, "faults"))
        return list(answer, answer_size);
    snprintf(answer, answer_size, "what is %s?", line);
    return false;
}
