/* libplugin_KVFS.so: what NIXL loads.
 *
 * NIXL compares the version of the plugin interface alone, which has stayed 1 while types and virtual functions changed. So the version of NIXL is
 * found by the library that calls: in a wheel it lies in `.<package>.mesonpy.libs`, beside `<package>-<version>.dist-info`. One that was not tried
 * is warned of, and loads the plugin if its own plugins have the same virtual functions (shape.h).
 */
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>

#include "engine.h"
#include "shape.h"
#include "tried.h" /* made of kvfs/connectors/tried.py: KVFS_NIXL_TRIED */

static constexpr const char *TRIED[] = {KVFS_NIXL_TRIED};

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

/* own: this plugin, which may lie among NIXL's. */
static bool accepts(const std::filesystem::path &library, const std::filesystem::path &own) {
    std::string version = version_of(library), tried;
    for (const char *one : TRIED) {
        if (version == one)
            return true;
        tried += std::string(tried.empty() ? "" : ", ") + one;
    }
    version = version.empty() ? "of an unknown version" : version;
    std::string difference = differs({library.parent_path() / "plugins", own.parent_path()});
    const char *any = getenv("KVFS_NIXL_ANY_VERSION");
    bool forced = any && strcmp(any, "1") == 0;
    if (difference.empty())
        say("%s is NIXL %s, which this plugin was not tried with (tried: %s): its interface is the same, so it is loaded", library.c_str(),
            version.c_str(), tried.c_str());
    else
        say("%s is NIXL %s, which this plugin was not tried with (tried: %s), and its interface differs: %s%s", library.c_str(), version.c_str(),
            tried.c_str(), difference.c_str(), forced ? "; loaded all the same" : ": not loaded; KVFS_NIXL_ANY_VERSION=1 loads it all the same");
    return difference.empty() || forced;
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
        Dl_info caller = {}, own = {};
        bool known = dladdr(__builtin_return_address(0), &caller) && caller.dli_fname;
        dladdr((void *)&plugin, &own);
        return accepts(known ? caller.dli_fname : "the program", own.dli_fname ? own.dli_fname : "") ? &plugin : nullptr;
    } catch (...) {
        return nullptr;
    }
}

__attribute__((visibility("default"))) void nixl_plugin_fini() {}
}
