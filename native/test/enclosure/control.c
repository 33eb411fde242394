/* The control socket: a line of words in, a line of JSON out: {"ok": true, ...} or {"ok": false, "error": "..."}.
 *
 *     fault KIND [what=..] [op=read,write,..] [subsystem=NQN] [namespace=N] [queue=admin|io|N] [count=N] [skip=N] [share=0..1]
 *                [ms=N] [factor=N] [status=N] [at=N]        -> "fault": id
 *     clear [ID]        faults        status        quit
 *     reset [NQN]                    every connection (to that subsystem) ends with a RST now
 *     listen on|off                  off: connections are refused
 *     attach|detach NQN NSID         a namespace comes or goes; hosts that asked are told
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "enclosure.h"

#define LINE_MAX_SIZE 1024
#define ANSWER_SIZE (64u << 10)

static bool fail(char *answer, const char *format, ...) __attribute__((format(printf, 2, 3)));
static bool fail(char *answer, const char *format, ...) {
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(answer, ANSWER_SIZE, format, arguments);
    va_end(arguments);
    return false;
}

static bool reset(const char *nqn, char *answer) {
    uint32_t count = 0;

    pthread_mutex_lock(&enclosure.lock);
    for (struct connection *connection = enclosure.connections; connection; connection = connection->next)
        if (!*nqn || (connection->subsystem && !strcmp(connection->subsystem->nqn, nqn))) {
            struct linger linger = {.l_onoff = 1, .l_linger = 0};
            struct sockaddr unspecified = {.sa_family = AF_UNSPEC};

            /* With no time to linger, disconnecting sends a RST; the thread finds the socket closed. */
            setsockopt(connection->fd, SOL_SOCKET, SO_LINGER, &linger, sizeof(linger));
            connect(connection->fd, &unspecified, sizeof(unspecified));
            connection_wake(connection);
            count++;
        }
    pthread_mutex_unlock(&enclosure.lock);
    snprintf(answer, ANSWER_SIZE, "\"connections\": %u", count);
    return true;
}

static bool attach(char *words, bool attached, char *answer) {
    char *rest, *nqn = strtok_r(words, " ", &rest), *number = strtok_r(NULL, " ", &rest);
    uint32_t nsid = number ? (uint32_t)strtoul(number, NULL, 10) : 0;

    for (uint32_t i = 0; nqn && i < enclosure.subsystem_count; i++) {
        struct subsystem *subsystem = enclosure.subsystems[i];

        if (strcmp(subsystem->nqn, nqn) || nsid == 0 || nsid > subsystem->namespace_count)
            continue;
        atomic_store(&subsystem->namespaces[nsid - 1].attached, attached);
        pthread_mutex_lock(&enclosure.lock);
        controller_namespace_changed(subsystem, nsid);
        pthread_mutex_unlock(&enclosure.lock);
        *answer = 0;
        return true;
    }
    return fail(answer, "there is no namespace %u in %s", nsid, nqn ? nqn : "''");
}

static bool set_listening(const char *word, char *answer) {
    int status = 0;

    if (!strcmp(word, "on"))
        status = listen_now();
    else if (!strcmp(word, "off"))
        listen_end();
    else
        return fail(answer, "listen on, or off, not %s", word);
    *answer = 0;
    return status ? fail(answer, "cannot listen: %s", strerror(-status)) : true;
}

static bool status(char *answer) {
    uint32_t controllers = 0;
    size_t used;

    pthread_mutex_lock(&enclosure.lock);
    for (struct controller *controller = enclosure.controllers; controller; controller = controller->next)
        controllers++;
    used = (size_t)snprintf(answer, ANSWER_SIZE, "\"port\": %u, \"connections\": %u, \"controllers\": %u, \"namespaces\": [", enclosure.options.port,
                            enclosure.connection_count, controllers);
    pthread_mutex_unlock(&enclosure.lock);
    for (uint32_t i = 0, first = 1; i < enclosure.subsystem_count; i++)
        for (uint32_t n = 0; n < enclosure.subsystems[i]->namespace_count && used < ANSWER_SIZE; n++, first = 0) {
            struct backing *backing = &enclosure.subsystems[i]->namespaces[n];
            uint32_t registered;
            bool held;

            reserve_count(backing, &registered, &held);
            used += (size_t)snprintf(answer + used, ANSWER_SIZE - used,
                                     "%s{\"subsystem\": \"%s\", \"nsid\": %u, \"size\": %lu, \"attached\": %s, \"reads\": %lu, \"writes\": %lu, "
                                     "\"read_bytes\": %lu, \"written_bytes\": %lu, \"registered\": %u, \"reserved\": %s}",
                                     first ? "" : ", ", enclosure.subsystems[i]->nqn, backing->nsid, backing->size,
                                     atomic_load(&backing->attached) ? "true" : "false", atomic_load(&backing->reads), atomic_load(&backing->writes),
                                     atomic_load(&backing->read_bytes), atomic_load(&backing->written_bytes), registered, held ? "true" : "false");
        }
    if (used < ANSWER_SIZE)
        snprintf(answer + used, ANSWER_SIZE - used, "]");
    return true;
}

static bool control(char *line, char *answer) {
    if (!strcmp(line, "status"))
        return status(answer);
    if (!strcmp(line, "reset") || !strncmp(line, "reset ", 6))
        return reset(line[5] ? line + 6 : "", answer);
    if (!strncmp(line, "listen ", 7))
        return set_listening(line + 7, answer);
    if (!strncmp(line, "attach ", 7) || !strncmp(line, "detach ", 7))
        return attach(line + 7, *line == 'a', answer);
    if (!strcmp(line, "quit")) {
        *answer = 0;
        return true;
    }
    return fault_control(line, answer, ANSWER_SIZE);
}

static void *client(void *argument) {
    FILE *in = fdopen((int)(intptr_t)argument, "r");
    char line[LINE_MAX_SIZE], *answer = malloc(ANSWER_SIZE);

    while (in && answer && fgets(line, sizeof(line), in)) {
        size_t size = strlen(line);
        bool ok;

        if (!size || line[size - 1] != '\n')
            break;
        line[size - 1] = 0;
        ok = control(line, answer);
        for (char *at = answer; !ok && *at; at++)
            if (*at == '"' || *at == '\\' || (unsigned char)*at < ' ')
                *at = '?';
        if (ok ? dprintf(fileno(in), "{\"ok\": true%s%s}\n", *answer ? ", " : "", answer) < 0
               : dprintf(fileno(in), "{\"ok\": false, \"error\": \"%s\"}\n", answer) < 0)
            break;
        if (!strcmp(line, "quit"))
            enclosure_quit();
    }
    free(answer);
    if (in)
        fclose(in);
    return NULL;
}

static void *listener(void *argument) {
    int fd = (int)(intptr_t)argument;

    for (;;) {
        int accepted = accept4(fd, NULL, NULL, SOCK_CLOEXEC);
        pthread_t thread;

        if (accepted < 0)
            continue;
        if (pthread_create(&thread, NULL, client, (void *)(intptr_t)accepted))
            close(accepted);
        else
            pthread_detach(thread);
    }
    return NULL;
}

int control_start(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    pthread_t thread;

    if (fd < 0 || strlen(path) >= sizeof(address.sun_path))
        return fd < 0 ? -errno : -ENAMETOOLONG;
    strcpy(address.sun_path, path);
    unlink(path);
    if (bind(fd, (struct sockaddr *)&address, sizeof(address)) || listen(fd, 16))
        return -errno;
    return -pthread_create(&thread, NULL, listener, (void *)(intptr_t)fd);
}
