/* The back end: DRAM beside objects and files of one kvfs mount.
 *
 * Each file uses those above it:
 *
 *     abi.h        NIXL's interface
 *     workers.cc   threads, and what waits for them
 *     pool.cc      libkvfs: the client, and batches of objects
 *     files.cc     files by descriptor or path
 *     transfer.cc  one transfer
 *     engine.cc    registrations, and NIXL's calls
 *     shape.cc     virtual functions of NIXL's back ends, as its plugins have them
 *     plugin.cc    what NIXL loads, and for which of its versions
 *
 * An object's key is the registration's metaInfo, or its device number in decimal digits; its address is the offset in the object. A transfer has one
 * status: an object that is not there, or whose bytes cannot be had, fails all of it with NIXL_ERR_NOT_FOUND.
 */
#ifndef KVFS_NIXL_ENGINE_H
#define KVFS_NIXL_ENGINE_H

#include <map>

#include "transfer.h"

class Engine final : public nixl::Engine {
  public:
    explicit Engine(const nixl::InitParameters &init) noexcept;
    ~Engine() override;

    bool supportsRemote() const override { return false; }
    bool supportsLocal() const override { return true; }
    bool supportsNotif() const override { return false; }
    std::vector<nixl::Memory> getSupportedMems() const override { return memories(); }
    nixl::Status registerMem(const nixl::Registration &registration, const nixl::Memory &memory, nixl::Metadata *&out) override;
    nixl::Status deregisterMem(nixl::Metadata *metadata) override;
    nixl::Status connect(const std::string &) override { return nixl::Status::success; }
    nixl::Status disconnect(const std::string &) override { return nixl::Status::success; }
    nixl::Status unloadMD(nixl::Metadata *) override { return nixl::Status::success; }
    nixl::Status loadLocalMD(nixl::Metadata *in, nixl::Metadata *&out) override;
    nixl::Status prepXfer(const nixl::Operation &operation, const nixl::List<nixl::Part> &local, const nixl::List<nixl::Part> &remote,
                          const std::string &to, nixl::Request *&request, const nixl::Options *options) const override;
    nixl::Status postXfer(const nixl::Operation &operation, const nixl::List<nixl::Part> &local, const nixl::List<nixl::Part> &remote,
                          const std::string &to, nixl::Request *&request, const nixl::Options *options) const override;
    nixl::Status checkXfer(nixl::Request *request) const override;
    nixl::Status releaseReqH(nixl::Request *request) const override;
    nixl::Status queryMem(const nixl::List<nixl::Registration> &list, std::vector<nixl::Answer> &answers) const override;

    static std::vector<nixl::Memory> memories() { return {nixl::Memory::object, nixl::Memory::file, nixl::Memory::dram}; }

  private:
    nixl::Status register_object(const nixl::Registration &registration, Target &target);
    nixl::Status register_file(const nixl::Registration &registration, Target &target);
    nixl::Status keep_device(Target &target);
    bool is_child() const;

    const int pid_; /* threads and connections are this process's, not its children's */
    std::shared_ptr<Pool> pool_;
    std::unique_ptr<Paths> paths_;
    std::unique_ptr<Workers> workers_; /* after pool_: their work uses it */
    std::mutex lock_;
    /* Device numbers of registered objects, and of files registered by path: what each is, and how often. NIXL finds a registration by its number. */
    std::map<std::pair<nixl::Memory, uint64_t>, std::pair<std::string, unsigned>> devices_;
};

#endif
