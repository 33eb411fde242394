/* sources: a program in NIXL's place: it makes back ends as NIXL does and asks them for everything, on the kvfs mount that is its argument.
 *
 * Built with sanitizers by `make -C native/shims/nixl address thread`; tests/connectors/test_nixl.py runs it. It says what fails, and ends with 1. */
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <string>
#include <sys/stat.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "../abi.h"

using namespace nixl;

extern "C" Plugin *nixl_plugin_init();

/* libkvfs is not instrumented: of its atomics ThreadSanitizer sees nothing. */
extern "C" __attribute__((used, visibility("default"))) const char *__tsan_default_suppressions() { return "called_from_lib:libkvfs.so.1\n"; }

#define CHECK(condition)                                                    \
    do {                                                                    \
        if (!(condition)) {                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            _exit(1);                                                       \
        }                                                                   \
    } while (0)

static constexpr size_t SIZE = 256 << 10, COUNT = 16;
static const std::string AGENT = "drive";
static Plugin *plugin;
static std::string mount;

template <class T> struct Made : List<T> {
    Made(Memory kind, std::vector<T> all) {
        this->memory = kind;
        this->items = std::move(all);
    }
};

static Engine *make(Parameters parameters) {
    InitParameters init = {AGENT, "KVFS", &parameters, false, 0, 0, false};
    return plugin->create_engine(&init);
}

/* NIXL reads this member, which no method shows. */
struct Look : Engine {
    static bool failed(Engine *engine) { return engine->*&Look::init_failed; }
};

static Engine *good(const char *space) {
    Engine *engine = make({{"mount", mount}, {"namespace", space}, {"timeout_ms", "20000"}, {"depth", "16"}});
    CHECK(engine && !Look::failed(engine));
    return engine;
}

static Metadata *registered(Engine *engine, Memory memory, uint64_t device, const std::string &meta) {
    Registration registration = {{0, 0, device}, meta};
    Metadata *metadata = nullptr, *loaded = nullptr;
    CHECK(engine->registerMem(registration, memory, metadata) == Status::success && metadata);
    CHECK(engine->loadLocalMD(metadata, loaded) == Status::success && loaded == metadata);
    return metadata;
}

struct Memories {
    std::vector<uint8_t> bytes = std::vector<uint8_t>(SIZE * COUNT);
    Part part(size_t offset, size_t size) { return {{(uintptr_t)bytes.data() + offset, size, 0}, nullptr}; }
};

static Status finish(Engine *engine, Request *request) {
    Status status;
    while ((status = engine->checkXfer(request)) == Status::in_progress)
        usleep(100);
    return status;
}

static Status transfer(Engine *engine, Operation operation, Memory memory, std::vector<Part> local, std::vector<Part> remote) {
    Made<Part> here(Memory::dram, std::move(local)), there(memory, std::move(remote));
    Request *request = nullptr;
    Status status = engine->prepXfer(operation, here, there, AGENT, request, nullptr);
    if (status != Status::success) {
        CHECK(!request);
        return status;
    }
    CHECK(engine->postXfer(operation, here, there, AGENT, request, nullptr) == Status::in_progress);
    status = finish(engine, request);
    CHECK(engine->releaseReqH(request) == Status::success);
    return status;
}

static void fill(Memories &memory, unsigned seed) {
    for (uint8_t &byte : memory.bytes)
        byte = (uint8_t)((seed = seed * 1103515245 + 12345) >> 16);
}

static void parameters() {
    const Parameters wrong[] = {
        {},
        {{"mount", ""}},
        {{"mount", mount}, {"bucket", "b"}},
        {{"mount", mount}, {"depth", "0"}},
        {{"mount", mount}, {"revision", "a/b"}},
        {{"mount", mount}, {"revision", std::string(200, 'r')}},
        {{"mount", mount}, {"depth", "65"}},
        {{"mount", mount}, {"timeout_ms", "2s"}},
        {{"mount", mount}, {"timeout_ms", "99999999999999999999"}},
        {{"mount", mount + std::string(1, 0)}},
    };
    for (const Parameters &one : wrong) {
        Engine *engine = make(one);
        CHECK(engine && Look::failed(engine));
        plugin->destroy_engine(engine);
    }
    Parameters given = plugin->get_backend_options();
    CHECK(given.size() == 5);
    given["mount"] = mount;
    Engine *engine = make(given); /* NIXL hands them back */
    CHECK(!Look::failed(engine));
    CHECK(!engine->supportsRemote() && engine->supportsLocal() && !engine->supportsNotif());
    CHECK(engine->getSupportedMems() == plugin->get_backend_mems() && plugin->api_version == 1 && !strcmp(plugin->get_plugin_name(), "KVFS"));
    plugin->destroy_engine(engine);
}

static void objects() {
    Engine *engine = good("objects");
    Memories in, out;
    fill(in, 1);
    std::vector<Metadata *> keys;
    std::vector<Part> from, to, remote;
    for (size_t i = 0; i < COUNT; i++) {
        keys.push_back(registered(engine, Memory::object, i + 1, i ? "key " + std::to_string(i) : ""));
        from.push_back(in.part(i * SIZE, SIZE));
        to.push_back(out.part(i * SIZE, SIZE));
        remote.push_back({{0, SIZE, i + 1}, keys[i]});
    }
    CHECK(transfer(engine, Operation::read, Memory::object, to, remote) == Status::not_found);
    CHECK(transfer(engine, Operation::write, Memory::object, from, remote) == Status::success);
    CHECK(transfer(engine, Operation::read, Memory::object, to, remote) == Status::success);
    CHECK(in.bytes == out.bytes);

    /* Longer than the object; a part that is not there; a write that is no whole object; memory and operands that are none. */
    remote[1].size = to[1].size = 2 * SIZE;
    CHECK(transfer(engine, Operation::read, Memory::object, {to[1]}, {remote[1]}) == Status::mismatch);
    remote[1].address = UINT64_MAX - 10;
    CHECK(transfer(engine, Operation::read, Memory::object, {to[1]}, {remote[1]}) == Status::invalid_parameter);
    remote[1] = {{4096, SIZE, 2}, keys[1]}, to[1].size = SIZE;
    CHECK(transfer(engine, Operation::write, Memory::object, {to[1]}, {remote[1]}) == Status::not_supported);
    CHECK(transfer(engine, Operation::read, Memory::file, {to[1]}, {remote[1]}) == Status::invalid_parameter);
    CHECK(transfer(engine, Operation::read, Memory::dram, {to[1]}, {remote[1]}) == Status::invalid_parameter);
    CHECK(transfer(engine, Operation::read, Memory::object, {to[1]}, {to[1]}) == Status::invalid_parameter);
    CHECK(transfer(engine, Operation::read, Memory::object, {to[1], to[2]}, {remote[1]}) == Status::invalid_parameter);
    CHECK(transfer(engine, Operation::read, Memory::object, {}, {}) == Status::invalid_parameter);

    /* Parts of an object, in any order: where libkvfs can write and read them, else a clear refusal. */
    std::vector<Part> parts_in, parts_out, parts_there;
    constexpr size_t QUARTER = SIZE / 4;
    for (size_t i = 0; i < 4; i++) {
        parts_in.push_back(in.part(SIZE + i * QUARTER, QUARTER));
        parts_out.push_back(out.part(i * QUARTER, QUARTER));
        parts_there.push_back({{(3 - i) * QUARTER, QUARTER, 2}, keys[1]});
    }
    remote[1].address = 0;
    Status wrote = transfer(engine, Operation::write, Memory::object, parts_in, parts_there);
    CHECK(wrote == Status::success || wrote == Status::not_supported);
    CHECK(transfer(engine, Operation::read, Memory::object, {to[1]}, {remote[1]}) == Status::success);
    for (size_t i = 0; i < 4; i++)
        CHECK(!memcmp(out.bytes.data() + SIZE + (wrote == Status::success ? 3 - i : i) * QUARTER, in.bytes.data() + SIZE + i * QUARTER, QUARTER));
    Status got = transfer(engine, Operation::read, Memory::object, parts_out, parts_there);
    CHECK(got == Status::success || got == Status::not_supported);
    for (size_t i = 0; i < 4 && got == Status::success; i++)
        CHECK(!memcmp(out.bytes.data() + i * QUARTER, out.bytes.data() + SIZE + (3 - i) * QUARTER, QUARTER));
    printf("parts are %swritten, and %sread\n", wrote == Status::success ? "" : "not ", got == Status::success ? "" : "not ");
    parts_there[0].address = 1; /* a gap */
    CHECK(transfer(engine, Operation::write, Memory::object, parts_in, parts_there) == Status::not_supported);

    /* Keys that are none, device numbers that are taken, GPU memory. */
    Metadata *none = nullptr;
    CHECK(engine->registerMem({{0, 0, 77}, std::string(300, 'k')}, Memory::object, none) == Status::invalid_parameter && !none);
    CHECK(engine->registerMem({{0, 0, 2}, "another"}, Memory::object, none) == Status::not_allowed && !none);
    CHECK(engine->registerMem({{0, 0, 0}, ""}, Memory::vram, none) == Status::not_supported && !none);
    CHECK(engine->registerMem({{0, 0, 0}, ""}, Memory::dram, none) == Status::success);
    CHECK(engine->deregisterMem(none) == Status::success);
    CHECK(engine->deregisterMem(registered(engine, Memory::object, 2, "key 1")) == Status::success);
    CHECK(engine->deregisterMem(keys[1]) == Status::success);
    keys[1] = registered(engine, Memory::object, 2, "another");

    std::vector<Answer> answers;
    Made<Registration> asked(Memory::object, {{{0, 0, 1}, ""}, {{0, 0, 0}, "key 2"}, {{0, 0, 0}, "key 99"}, {{0, 0, 0}, std::string(999, 'k')}});
    CHECK(engine->queryMem(asked, answers) == Status::success && answers.size() == 4);
    CHECK(answers[0] && answers[1] && (*answers[1])["size"] == std::to_string(SIZE) && !answers[2] && !answers[3]);
    CHECK(engine->queryMem(Made<Registration>(Memory::dram, {}), answers) == Status::not_supported);
    for (Metadata *key : keys)
        CHECK(engine->deregisterMem(key) == Status::success);
    plugin->destroy_engine(engine);
}

static void files() {
    Engine *engine = good("files");
    Memories in, out;
    fill(in, 2);
    std::string path = mount + "/drive file";
    Metadata *none = nullptr;
    CHECK(engine->registerMem({{0, 0, 1}, "ro:" + path}, Memory::file, none) == Status::not_found && !none);
    CHECK(engine->registerMem({{0, 0, 1}, "rw,create:/proc/version"}, Memory::file, none) != Status::success && !none);
    CHECK(engine->registerMem({{0, 0, 999}, ""}, Memory::file, none) == Status::invalid_parameter && !none);
    /* Nothing is made beside the mount, nor through a link on it. */
    char beside[] = "/tmp/kvfs-drive-XXXXXX";
    CHECK(mkdtemp(beside));
    std::string outside = std::string(beside) + "/made", link = mount + "/drive link";
    CHECK(symlink(outside.c_str(), link.c_str()) == 0);
    for (const std::string &path : {outside, link, link + "/made", mount + "/drive link/"})
        CHECK(engine->registerMem({{0, 0, 1}, "rw,create:" + path}, Memory::file, none) != Status::success && !none);
    CHECK(access(outside.c_str(), F_OK) < 0 && unlink(link.c_str()) == 0 && rmdir(beside) == 0);
    Metadata *file = registered(engine, Memory::file, 1, "rw,create:" + path);
    CHECK(engine->registerMem({{0, 0, 1}, "ro:" + mount}, Memory::file, none) != Status::success);
    std::vector<Part> from, to, remote;
    for (size_t i = 0; i < COUNT; i++) {
        from.push_back(in.part(i * SIZE, SIZE));
        to.push_back(out.part(i * SIZE, SIZE));
        remote.push_back({{i * SIZE, SIZE, 1}, file});
    }
    CHECK(transfer(engine, Operation::write, Memory::file, from, remote) == Status::success);
    CHECK(transfer(engine, Operation::read, Memory::file, to, remote) == Status::success && in.bytes == out.bytes);
    CHECK(engine->deregisterMem(file) == Status::success); /* closed: it is sealed now */

    /* By a descriptor; past the end; look-ups. */
    int fd = open(path.c_str(), O_RDONLY);
    file = registered(engine, Memory::file, (uint64_t)fd, path);
    for (Part &part : remote)
        part.metadata = file;
    std::fill(out.bytes.begin(), out.bytes.end(), 0);
    CHECK(transfer(engine, Operation::read, Memory::file, to, remote) == Status::success && in.bytes == out.bytes);
    CHECK(transfer(engine, Operation::write, Memory::file, from, remote) == Status::backend);
    remote[0].address = COUNT * SIZE - 1;
    CHECK(transfer(engine, Operation::read, Memory::file, {to[0]}, {remote[0]}) == Status::mismatch);
    CHECK(engine->deregisterMem(file) == Status::success && close(fd) == 0);
    std::vector<Answer> answers;
    Made<Registration> asked(Memory::file,
                             {{{0, 0, 0}, path}, {{0, 0, 0}, "ro:" + path}, {{0, 0, 0}, path + "x"}, {{0, 0, 0}, ""}, {{0, 0, 0}, mount}});
    CHECK(engine->queryMem(asked, answers) == Status::success && answers.size() == 5);
    CHECK(answers[0] && (*answers[0])["size"] == std::to_string(SIZE * COUNT) && answers[1] && !answers[2] && !answers[3] && answers[4]);
    int directory = open(mount.c_str(), O_RDONLY | O_DIRECTORY), elsewhere = open("/proc/self/exe", O_RDONLY);
    CHECK(engine->registerMem({{0, 0, (uint64_t)directory}, ""}, Memory::file, none) == Status::invalid_parameter);
    CHECK(engine->registerMem({{0, 0, (uint64_t)elsewhere}, ""}, Memory::file, none) == Status::invalid_parameter);
    close(directory), close(elsewhere);
    plugin->destroy_engine(engine);
}

/* Posts while it is under way, releases before the end, an engine that goes, threads side by side. */
static void races() {
    Engine *engine = good("races");
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < 8; t++)
        threads.emplace_back([engine, t] {
            Memories memory;
            fill(memory, t);
            Metadata *key = registered(engine, Memory::object, 100 + t, "thread " + std::to_string(t));
            for (unsigned round = 0; round < 30; round++) {
                Operation operation = round % 2 ? Operation::read : Operation::write;
                Made<Part> here(Memory::dram, {memory.part(0, SIZE)}), there(Memory::object, {{{0, SIZE, 100 + t}, key}});
                Request *request = nullptr;
                CHECK(engine->prepXfer(operation, here, there, AGENT, request, nullptr) == Status::success);
                CHECK(engine->postXfer(operation, here, there, AGENT, request, nullptr) == Status::in_progress);
                if (round % 5 == 4) {
                    Status status;
                    while ((status = engine->releaseReqH(request)) == Status::repost_active)
                        usleep(50);
                    CHECK(status == Status::success);
                    continue;
                }
                Status again = engine->postXfer(operation, here, there, AGENT, request, nullptr);
                CHECK(again == Status::repost_active || again == Status::in_progress);
                CHECK(finish(engine, request) == Status::success);
                CHECK(engine->postXfer(operation, here, there, AGENT, request, nullptr) == Status::in_progress);
                CHECK(finish(engine, request) == Status::success);
                CHECK(engine->releaseReqH(request) == Status::success);
            }
            CHECK(engine->deregisterMem(key) == Status::success);
        });
    for (std::thread &thread : threads)
        thread.join();

    /* Many that wait; then the engine goes. NIXL frees no request after its engine. */
    Memories memory;
    Metadata *key = registered(engine, Memory::object, 1, "last");
    Made<Part> here(Memory::dram, {memory.part(0, SIZE)}), there(Memory::object, {{{0, SIZE, 1}, key}});
    std::vector<Request *> requests(50);
    for (Request *&request : requests) {
        CHECK(engine->prepXfer(Operation::write, here, there, AGENT, request, nullptr) == Status::success);
        CHECK(engine->postXfer(Operation::write, here, there, AGENT, request, nullptr) == Status::in_progress);
    }
    for (Request *request : requests)
        while (engine->releaseReqH(request) == Status::repost_active)
            usleep(50);
    CHECK(engine->deregisterMem(key) == Status::success);
    plugin->destroy_engine(engine);
}

/* A child has neither the threads nor the connection: it is told so, and ends without waiting for them. */
static void forked() {
    Engine *engine = good("forked");
    Memories memory;
    Metadata *key = registered(engine, Memory::object, 1, "a key");
    Made<Part> here(Memory::dram, {memory.part(0, SIZE)}), there(Memory::object, {{{0, SIZE, 1}, key}});
    Request *request = nullptr;
    CHECK(engine->prepXfer(Operation::write, here, there, AGENT, request, nullptr) == Status::success);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(30);
        std::vector<Answer> answers;
        CHECK(engine->postXfer(Operation::write, here, there, AGENT, request, nullptr) == Status::backend);
        CHECK(engine->queryMem(Made<Registration>(Memory::object, {{{0, 0, 0}, "a key"}}), answers) == Status::success && !answers[0]);
        CHECK(engine->releaseReqH(request) == Status::success && engine->deregisterMem(key) == Status::success);
        plugin->destroy_engine(engine);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(engine->postXfer(Operation::write, here, there, AGENT, request, nullptr) == Status::in_progress);
    CHECK(finish(engine, request) == Status::success && engine->releaseReqH(request) == Status::success);
    CHECK(engine->deregisterMem(key) == Status::success);
    plugin->destroy_engine(engine);
}

/* Nothing of kvfs is there: each call has its answer, and none of them waits. */
static void away() {
    Engine *engine = make({{"mount", "/proc"}});
    CHECK(!Look::failed(engine));
    Memories memory;
    Metadata *key = registered(engine, Memory::object, 1, "a key");
    std::vector<Answer> answers;
    CHECK(engine->queryMem(Made<Registration>(Memory::object, {{{0, 0, 0}, "a key"}}), answers) == Status::success && !answers[0]);
    for (Operation operation : {Operation::read, Operation::write})
        CHECK(transfer(engine, operation, Memory::object, {memory.part(0, SIZE)}, {{{0, SIZE, 1}, key}}) == Status::backend);
    CHECK(engine->deregisterMem(key) == Status::success);
    plugin->destroy_engine(engine);
}

int main(int count, char **words) {
    if (count != 2)
        return 2;
    mount = words[1];
    unsetenv("KVFS_NIXL_ANY_VERSION");
    CHECK(!nixl_plugin_init()); /* nothing of NIXL's is beside this program: nobody can tell */
    setenv("KVFS_NIXL_ANY_VERSION", "1", 1);
    CHECK((plugin = nixl_plugin_init()));
    parameters();
    objects();
    files();
    races();
    forked();
    away();
    puts("ok");
    return 0;
}
