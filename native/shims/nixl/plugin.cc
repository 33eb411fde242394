/* libplugin_KVFS.so: what NIXL loads, for the versions of NIXL that it was tried with.
 *
 * NIXL compares the version of the plugin interface alone, which has stayed 1 while types and virtual functions changed. So the version of NIXL is
 * found by the library that calls: in a wheel it lies in `.<package>.mesonpy.libs`, beside `<package>-<version>.dist-info`.
 */
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <filesystem>

#include "engine.h"

static constexpr const char *TRIED[] = {"1.5.1"};

/* Of the wheel that a library of NIXL's came with; empty: it came with none. */
static std::string version_of(const std::filesystem::path &library) {
    const std::string libs = library.parent_path().filename().string(), end = ".mesonpy.libs";
    if (libs.size() <= 1 + end.size() || libs[0] != '.' || !libs.ends_with(end))
        return "";
    const std::string package = libs.substr(1, libs.size() - 1 - end.size()) + "-", suffix = ".dist-info";
    std::string version;
    std::error_code error;
    for (std::filesystem::directory_iterator at(library.parent_path() / "..", error), none; !error && at != none; at.increment(error)) {
        std::string name = at->path().filename().string();
        if (!name.starts_with(package) || !name.ends_with(suffix))
            continue;
        if (!version.empty()) /* two: which is it? */
            return "";
        version = name.substr(package.size(), name.size() - package.size() - suffix.size());
    }
    return error ? "" : version;
}

static bool accepts(const std::string &library) {
    std::string version = version_of(library), tried;
    for (const char *one : TRIED) {
        if (version == one)
            return true;
        tried += std::string(tried.empty() ? "" : ", ") + one;
    }
    const char *any = getenv("KVFS_NIXL_ANY_VERSION");
    bool forced = any && strcmp(any, "1") == 0;
    if (version.empty())
        version = "of an unknown version";
    say("%s is NIXL %s, which this plugin was not tried with (tried: %s)%s", library.c_str(), version.c_str(), tried.c_str(),
        forced ? "; loaded all the same" : ": not loaded; KVFS_NIXL_ANY_VERSION=1 loads it all the same");
    return forced;
}

static nixl::Plugin plugin = {
    nixl::PLUGIN_API_VERSION,
    [](const nixl::InitParameters *init) -> nixl::Engine * {
        try {
            return new Engine(*init);
        } catch (...) {
            return nullptr;
        }
    },
    [](nixl::Engine *engine) { delete engine; },
    [] { return "KVFS"; },
    [] { return "1"; },
    [] { return Settings::defaults(); },
    [] { return Engine::memories(); },
};

extern "C" {

__attribute__((visibility("default"))) nixl::Plugin *nixl_plugin_init() {
    try {
        Dl_info caller = {};
        bool known = dladdr(__builtin_return_address(0), &caller) && caller.dli_fname;
        return accepts(known ? caller.dli_fname : "the program") ? &plugin : nullptr;
    } catch (...) {
        return nullptr;
    }
}

__attribute__((visibility("default"))) void nixl_plugin_fini() {}
}
