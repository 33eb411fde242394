/* A plugin of NIXL's own, as far as its table of virtual functions tells: the class that all have, and one of a back end. It is made as a shared
 * library, without optimization, which would leave the table of the first class out. EXTRA, SWAPPED, RETYPED: an interface that differs. */
#include <chrono>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

enum nixl_mem_t : unsigned { DRAM };
enum nixl_xfer_op_t : unsigned { READ };
enum nixl_status_t : int { OK };
enum class nixl_cost_t : int { NONE };
struct nixlBlobDesc;
struct nixlMetaDesc;
struct nixlRemoteMetaDesc;
struct nixlBackendMD;
struct nixlBackendReqH;
struct nixlBackendOptionalArgs;
struct nixlAgentOptionalArgs;
template <class T> struct nixlDescList;
using Text = std::string;
using Meta = nixlDescList<nixlMetaDesc>;
using Options = nixlBackendOptionalArgs;
using Answers = std::vector<std::optional<std::unordered_map<Text, Text>>>;
using Time = std::chrono::microseconds;
#ifdef RETYPED
using Size = int;
#else
using Size = const Options *;
#endif

class nixlBackendEngine {
  public:
    virtual ~nixlBackendEngine() = default;
    virtual bool supportsRemote() const = 0;
#ifdef SWAPPED
    virtual bool supportsNotif() const = 0;
    virtual bool supportsLocal() const = 0;
#else
    virtual bool supportsLocal() const = 0;
    virtual bool supportsNotif() const = 0;
#endif
    virtual std::vector<nixl_mem_t> getSupportedMems() const = 0;
    virtual nixl_status_t registerMem(const nixlBlobDesc &, const nixl_mem_t &, nixlBackendMD *&) = 0;
    virtual nixl_status_t deregisterMem(nixlBackendMD *) = 0;
    virtual nixl_status_t connect(const Text &) = 0;
    virtual nixl_status_t disconnect(const Text &) = 0;
    virtual nixl_status_t unloadMD(nixlBackendMD *) = 0;
    virtual nixl_status_t prepXfer(const nixl_xfer_op_t &, const Meta &, const Meta &, const Text &, nixlBackendReqH *&, const Options *) const = 0;
    virtual nixl_status_t postXfer(const nixl_xfer_op_t &, const Meta &, const Meta &, const Text &, nixlBackendReqH *&, const Options *) const = 0;
    virtual nixl_status_t checkXfer(nixlBackendReqH *) const = 0;
    virtual nixl_status_t releaseReqH(nixlBackendReqH *) const = 0;
    virtual nixl_status_t prepMemView(const nixlDescList<nixlRemoteMetaDesc> &, void *&, Size) const { return OK; }
    virtual nixl_status_t prepMemView(const Meta &, void *&, const Options *) const { return OK; }
    virtual void releaseMemView(void *) const {}
    virtual nixl_status_t getPublicData(const nixlBackendMD *, Text &) const { return OK; }
    virtual nixl_status_t getConnInfo(Text &) const { return OK; }
    virtual nixl_status_t loadRemoteConnInfo(const Text &, const Text &) { return OK; }
    virtual nixl_status_t loadRemoteMD(const nixlBlobDesc &, const nixl_mem_t &, const Text &, nixlBackendMD *&) { return OK; }
    virtual nixl_status_t loadLocalMD(nixlBackendMD *, nixlBackendMD *&) { return OK; }
    virtual nixl_status_t getNotifs(std::vector<std::pair<Text, Text>> &) { return OK; }
    virtual nixl_status_t genNotif(const Text &, const Text &) const { return OK; }
    virtual nixl_status_t queryMem(const nixlDescList<nixlBlobDesc> &, Answers &) const { return OK; }
    virtual nixl_status_t estimateXferCost(const nixl_xfer_op_t &, const Meta &, const Meta &, const Text &, nixlBackendReqH *const &, Time &, Time &,
                                           nixl_cost_t &, const nixlAgentOptionalArgs *) const {
        return OK;
    }
#ifdef EXTRA
    virtual nixl_status_t another() { return OK; }
#endif
};

class Some : public nixlBackendEngine {
  public:
    bool supportsRemote() const override { return false; }
    bool supportsLocal() const override { return false; }
    bool supportsNotif() const override { return false; }
    std::vector<nixl_mem_t> getSupportedMems() const override { return {}; }
    nixl_status_t registerMem(const nixlBlobDesc &, const nixl_mem_t &, nixlBackendMD *&) override { return OK; }
    nixl_status_t deregisterMem(nixlBackendMD *) override { return OK; }
    nixl_status_t connect(const Text &) override { return OK; }
    nixl_status_t disconnect(const Text &) override { return OK; }
    nixl_status_t unloadMD(nixlBackendMD *) override { return OK; }
    nixl_status_t prepXfer(const nixl_xfer_op_t &, const Meta &, const Meta &, const Text &, nixlBackendReqH *&, const Options *) const override {
        return OK;
    }
    nixl_status_t postXfer(const nixl_xfer_op_t &, const Meta &, const Meta &, const Text &, nixlBackendReqH *&, const Options *) const override {
        return OK;
    }
    nixl_status_t checkXfer(nixlBackendReqH *) const override { return OK; }
    nixl_status_t releaseReqH(nixlBackendReqH *) const override { return OK; }
};
nixlBackendEngine *made() { return new Some; }

/* Called in NIXL's place: the plugin looks who calls. */
extern "C" void *call(void *(*function)()) {
    void *volatile answer = function();
    return answer;
}
