/* Tables of virtual functions in files of plugins: a symbol says where one lies and how long it is, relocations name the function of each slot. */
#include <algorithm>
#include <cstring>
#include <cxxabi.h>
#include <elf.h>
#include <fcntl.h>
#include <memory>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <unordered_map>

#include "base/descriptor.h"
#include "shape.h"

namespace fs = std::filesystem;

#define TEXT "NSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
#define XFER "ERK14nixl_xfer_op_tRK12nixlDescListI12nixlMetaDescES7_RK" TEXT "RP15nixlBackendReqHPK23nixlBackendOptionalArgs"

/* Names as the compiler mangles them, without the class. K: const. */
static const char *const SLOTS[] = {
    "D1Ev",
    "D0Ev",
    "K14supportsRemoteEv",
    "K13supportsLocalEv",
    "K13supportsNotifEv",
    "K16getSupportedMemsEv",
    "11registerMemERK12nixlBlobDescRK10nixl_mem_tRP13nixlBackendMD",
    "13deregisterMemEP13nixlBackendMD",
    "7connectERK" TEXT,
    "10disconnectERK" TEXT,
    "8unloadMDEP13nixlBackendMD",
    "K8prepXfer" XFER,
    "K8postXfer" XFER,
    "K9checkXferEP15nixlBackendReqH",
    "K11releaseReqHEP15nixlBackendReqH",
    "K11prepMemViewERK12nixlDescListI18nixlRemoteMetaDescERPvPK23nixlBackendOptionalArgs",
    "K11prepMemViewERK12nixlDescListI12nixlMetaDescERPvPK23nixlBackendOptionalArgs",
    "K14releaseMemViewEPv",
    "K13getPublicDataEPK13nixlBackendMDR" TEXT,
    "K11getConnInfoER" TEXT,
    "18loadRemoteConnInfoERK" TEXT "S7_",
    "12loadRemoteMDERK12nixlBlobDescRK10nixl_mem_tRK" TEXT "RP13nixlBackendMD",
    "11loadLocalMDEP13nixlBackendMDRS1_",
    "9getNotifsERSt6vectorISt4pairI" TEXT "S7_ESaIS8_EE",
    "K8genNotifERK" TEXT "S7_",
    "K8queryMemERK12nixlDescListI12nixlBlobDescERSt6vectorISt8optionalISt13unordered_mapI" TEXT
    "SD_St4hashISD_ESt8equal_toISD_ESaISt4pairIKSD_SD_EEEESaISN_EE",
    "K16estimateXferCostERK14nixl_xfer_op_tRK12nixlDescListI12nixlMetaDescES7_RK" TEXT
    "RKP15nixlBackendReqHRNSt6chrono8durationIlSt5ratioILl1ELl1000000EEEESP_R11nixl_cost_tPK21nixlAgentOptionalArgs",
};
static constexpr size_t COUNT = std::size(SLOTS);
/* From this one on the class of NIXL has functions of its own: their names are in each plugin. */
static constexpr size_t OWN = 15;
static constexpr char BASE[] = "_ZTV17nixlBackendEngine", CLASS[] = "17nixlBackendEngine";

/* A library's file in memory; every place in it is checked. */
class Library {
    const char *data_ = nullptr;
    size_t size_ = 0;

  public:
    explicit Library(const fs::path &path) {
        int fd = descriptor_above(open(path.c_str(), O_RDONLY | O_CLOEXEC));
        struct stat found;
        if (fd >= 0 && !fstat(fd, &found) && S_ISREG(found.st_mode) && found.st_size > 0) {
            void *mapped = mmap(nullptr, found.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
            if (mapped != MAP_FAILED) {
                data_ = (const char *)mapped;
                size_ = found.st_size;
            }
        }
        if (fd >= 0)
            close(fd);
    }
    Library(const Library &) = delete;
    Library &operator=(const Library &) = delete;
    ~Library() {
        if (data_)
            munmap((void *)data_, size_);
    }

    /* `count` of these at an offset, copied as they may lie anywhere; nothing if the file has not that many. */
    template <class T> std::vector<T> at(uint64_t offset, uint64_t count) const {
        std::vector<T> out;
        if (offset <= size_ && count <= (size_ - offset) / sizeof(T)) {
            out.resize(count);
            if (count)
                memcpy((void *)out.data(), data_ + offset, count * sizeof(T));
        }
        return out;
    }
    std::string text(const Elf64_Shdr &strings, uint64_t offset) const {
        if (strings.sh_offset > size_ || strings.sh_size > size_ - strings.sh_offset || offset >= strings.sh_size)
            return "";
        const char *from = data_ + strings.sh_offset + offset;
        return std::string(from, strnlen(from, strings.sh_size - offset));
    }
};

/* Each table of virtual functions that a library exports: mangled names, slot by slot; "" is one without a name. */
static std::unordered_map<std::string, std::vector<std::string>> tables_of(const Library &library) {
    std::unordered_map<std::string, std::vector<std::string>> tables;
    auto header = library.at<Elf64_Ehdr>(0, 1);
    if (header.empty() || memcmp(header[0].e_ident, ELFMAG, SELFMAG) || header[0].e_ident[EI_CLASS] != ELFCLASS64 ||
        header[0].e_shentsize != sizeof(Elf64_Shdr))
        return tables;
    auto sections = library.at<Elf64_Shdr>(header[0].e_shoff, header[0].e_shnum);
    for (size_t index = 0; index < sections.size(); index++) {
        if (sections[index].sh_type != SHT_DYNSYM || sections[index].sh_link >= sections.size())
            continue;
        const Elf64_Shdr &strings = sections[sections[index].sh_link];
        auto symbols = library.at<Elf64_Sym>(sections[index].sh_offset, sections[index].sh_size / sizeof(Elf64_Sym));
        std::unordered_map<uint64_t, uint32_t> slots; /* by address: the symbol that a relocation puts there */
        for (const Elf64_Shdr &section : sections)
            if (section.sh_type == SHT_RELA && section.sh_link == index)
                for (const Elf64_Rela &one : library.at<Elf64_Rela>(section.sh_offset, section.sh_size / sizeof(Elf64_Rela)))
                    slots[one.r_offset] = ELF64_R_SYM(one.r_info);
        for (const Elf64_Sym &symbol : symbols) {
            std::string name = library.text(strings, symbol.st_name);
            if (!name.starts_with("_ZTV") || symbol.st_shndx == SHN_UNDEF || symbol.st_size > 1 << 16)
                continue;
            std::vector<std::string> functions; /* behind the offset to the object's top, and its type */
            for (uint64_t at = 16; at + 8 <= symbol.st_size; at += 8) {
                auto slot = slots.find(symbol.st_value + at);
                bool named = slot != slots.end() && slot->second && slot->second < symbols.size();
                functions.push_back(named ? library.text(strings, symbols[slot->second].st_name) : "");
            }
            tables[name] = std::move(functions);
        }
    }
    return tables;
}

/* A mangled name without the class that it begins with. */
static std::string without_class(const std::string &mangled) {
    if (!mangled.starts_with("_ZN"))
        return mangled;
    size_t at = 3;
    bool is_const = at < mangled.size() && mangled[at] == 'K';
    at += is_const;
    size_t length = 0;
    while (at < mangled.size() && mangled[at] >= '0' && mangled[at] <= '9' && length < mangled.size())
        length = 10 * length + (mangled[at++] - '0');
    return at + length > mangled.size() ? mangled : (is_const ? "K" : "") + mangled.substr(at + length);
}

/* For people: `slot` is SLOTS' or of that kind. */
static std::string readable(const std::string &slot) {
    bool is_const = slot.starts_with("K");
    std::string mangled = std::string("_ZN") + (is_const ? "K" : "") + CLASS + slot.substr(is_const);
    int status = 0;
    std::unique_ptr<char, decltype(&free)> said(abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status), free);
    std::string text = status ? slot : said.get();
    size_t from = text.find("::");
    return (from == std::string::npos ? text : text.substr(from + 2)).substr(0, 120);
}

static std::string compare(const std::vector<std::string> &functions, size_t from, size_t to) {
    for (size_t slot = from; slot < to; slot++) {
        std::string found = without_class(functions[slot]);
        if (found != SLOTS[slot] && !(slot == 0 && found == "D2Ev"))
            return "virtual function " + std::to_string(slot) + " is " + (found.empty() ? "one without a name" : readable(found)) + ", and not " +
                   readable(SLOTS[slot]);
    }
    return "";
}

/* Of one plugin; false: it has no such tables, or only some of the names. */
static bool tells(const fs::path &path, std::string &difference) {
    auto tables = tables_of(Library(path));
    auto base = tables.find(BASE);
    if (base == tables.end())
        return false;
    const std::vector<std::string> own = base->second;
    if (own.size() != COUNT) {
        difference = "a back end has " + std::to_string(own.size()) + " virtual functions, and not " + std::to_string(COUNT);
        return true;
    }
    difference = compare(own, OWN, COUNT);
    if (!difference.empty())
        return true;
    tables.erase(base);
    /* NIXL has no names for those that every back end must have: a class that has NIXL's functions, or some of them, names them all. */
    for (const auto &[name, functions] : tables) {
        if (functions.size() < COUNT || std::find(functions.begin(), functions.end(), "__cxa_pure_virtual") != functions.end() ||
            std::find_first_of(functions.begin(), functions.end(), own.begin() + OWN, own.end()) == functions.end())
            continue;
        difference = compare(functions, 0, COUNT);
        return true;
    }
    return false;
}

std::string differs(const std::vector<fs::path> &directories) {
    std::vector<fs::path> plugins;
    std::string places;
    for (const fs::path &directory : directories) {
        std::error_code error;
        for (fs::directory_iterator at(directory, error), none; !error && at != none; at.increment(error)) {
            std::string name = at->path().filename().string();
            if (name.starts_with("libplugin_") && name.ends_with(".so") && name != "libplugin_KVFS.so")
                plugins.push_back(at->path());
        }
        places += (places.empty() ? "" : ", ") + directory.string();
    }
    /* This one is in every build of NIXL, and small. */
    std::stable_partition(plugins.begin(), plugins.end(), [](const fs::path &path) { return path.filename() == "libplugin_POSIX.so"; });
    for (const fs::path &path : plugins)
        if (std::string difference; tells(path, difference))
            return difference.empty() ? "" : difference + " (by " + path.string() + ")";
    return "no plugin of NIXL's own in " + places + " tells which virtual functions a back end has";
}
