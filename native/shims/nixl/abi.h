/* The interface between NIXL and a back end, declared from the binary interface: plugin API version 1, as in the wheels of 1.3.2 to 1.5.1.
 *
 * Types that cross it are laid out as NIXL lays them out; the names of functions are NIXL's, those of types and fields are ours. The order of the
 * virtual functions of Engine is the interface: tests/connectors/test_nixl.py compares it, slot by slot, with a plugin of the wheel. shape.cc has it
 * once more, by mangled names. Both sides use one libstdc++, with the C++11 ABI of strings.
 */
#ifndef KVFS_NIXL_ABI_H
#define KVFS_NIXL_ABI_H

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace nixl {

constexpr int PLUGIN_API_VERSION = 1;

enum class Memory : unsigned { dram, vram, block, object, file };
enum class Operation : unsigned { read, write };
enum class Status : int {
    in_progress = 1,
    success = 0,
    invalid_parameter = -2,
    backend = -3,
    not_found = -4,
    mismatch = -5,
    not_allowed = -6,
    repost_active = -7,
    not_supported = -9,
    canceled = -11,
};

using Parameters = std::unordered_map<std::string, std::string>;
using Answer = std::optional<Parameters>; /* of queryMem: nothing, or what is known */

struct Descriptor {
    uintptr_t address; /* of objects and files: the offset in them */
    size_t size;
    uint64_t device;
};

struct Registration : Descriptor {
    std::string meta;
};

/* Of one registration; the back end makes it and frees it. */
class Metadata {
  protected:
    bool is_private = true;

  public:
    virtual ~Metadata() = default;
};

struct Part : Descriptor {
    Metadata *metadata;
};

/* NIXL makes these; the back end only looks into them. */
template <class T> class List {
  protected:
    Memory memory;
    std::vector<T> items;

  public:
    virtual ~List() = default;
    Memory type() const { return memory; }
    const std::vector<T> &all() const { return items; }
};
struct RemotePart;

/* A prepared transfer; the back end makes it, and frees it in releaseReqH(). */
class Request {
  public:
    virtual ~Request() = default;
};

struct Options {
    std::string notification;
    bool notifies;
    std::string custom;
};

struct InitParameters {
    std::string agent;
    std::string type;
    Parameters *custom;
    bool progress_thread;
    uint64_t progress_delay_us;
    int thread_sync;
    bool telemetry;
};

class Engine {
    std::string type_;
    Parameters custom_;
    std::vector<uint64_t> telemetry_events_; /* NIXL's elements; always empty here */
    std::mutex telemetry_lock_;

  protected:
    bool init_failed = false; /* NIXL looks at it after the constructor */
    const std::string agent;
    const bool telemetry;

  public:
    explicit Engine(const InitParameters &init) : type_(init.type), custom_(*init.custom), agent(init.agent), telemetry(init.telemetry) {}
    Engine(const Engine &) = delete;
    Engine &operator=(const Engine &) = delete;
    virtual ~Engine() = default;

    virtual bool supportsRemote() const = 0;
    virtual bool supportsLocal() const = 0;
    virtual bool supportsNotif() const = 0;
    virtual std::vector<Memory> getSupportedMems() const = 0;
    virtual Status registerMem(const Registration &registration, const Memory &memory, Metadata *&out) = 0;
    virtual Status deregisterMem(Metadata *metadata) = 0;
    virtual Status connect(const std::string &agent) = 0;
    virtual Status disconnect(const std::string &agent) = 0;
    virtual Status unloadMD(Metadata *metadata) = 0;
    virtual Status prepXfer(const Operation &operation, const List<Part> &local, const List<Part> &remote, const std::string &agent,
                            Request *&request, const Options *options = nullptr) const = 0;
    virtual Status postXfer(const Operation &operation, const List<Part> &local, const List<Part> &remote, const std::string &agent,
                            Request *&request, const Options *options = nullptr) const = 0;
    virtual Status checkXfer(Request *request) const = 0;
    virtual Status releaseReqH(Request *request) const = 0;
    virtual Status prepMemView(const List<RemotePart> &, void *&, const Options * = nullptr) const { return Status::not_supported; }
    virtual Status prepMemView(const List<Part> &, void *&, const Options * = nullptr) const { return Status::not_supported; }
    virtual void releaseMemView(void *) const {}
    virtual Status getPublicData(const Metadata *, std::string &) const { return Status::backend; }
    virtual Status getConnInfo(std::string &) const { return Status::backend; }
    virtual Status loadRemoteConnInfo(const std::string &, const std::string &) { return Status::backend; }
    virtual Status loadRemoteMD(const Registration &, const Memory &, const std::string &, Metadata *&) { return Status::backend; }
    virtual Status loadLocalMD(Metadata *, Metadata *&) { return Status::backend; }
    virtual Status getNotifs(std::vector<std::pair<std::string, std::string>> &) { return Status::backend; }
    virtual Status genNotif(const std::string &, const std::string &) const { return Status::backend; }
    virtual Status queryMem(const List<Registration> &, std::vector<Answer> &) const { return Status::not_supported; }
    virtual Status estimateXferCost(const Operation &, const List<Part> &, const List<Part> &, const std::string &, Request *const &,
                                    std::chrono::microseconds &, std::chrono::microseconds &, int &, const void * = nullptr) const {
        return Status::not_supported;
    }
};

struct Plugin {
    int api_version;
    Engine *(*create_engine)(const InitParameters *init);
    void (*destroy_engine)(Engine *engine);
    const char *(*get_plugin_name)();
    const char *(*get_plugin_version)();
    Parameters (*get_backend_options)();
    std::vector<Memory> (*get_backend_mems)();
};

static_assert(sizeof(Descriptor) == 24 && sizeof(Registration) == 56 && sizeof(Part) == 32 && sizeof(List<Part>) == 40, "descriptors");
static_assert(sizeof(Metadata) == 16 && sizeof(Request) == 8 && sizeof(Options) == 72 && sizeof(InitParameters) == 96, "arguments");
/* A mutex has 40 bytes on x86-64, 48 on aarch64. */
static_assert(sizeof(Engine) == 168 + sizeof(std::mutex) && sizeof(Plugin) == 56 && sizeof(Answer) == 64, "engine");

} // namespace nixl

#endif
