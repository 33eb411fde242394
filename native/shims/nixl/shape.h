/* The shape of NIXL's interface, as a plugin of its own has it: which virtual functions a back end has, and with which arguments. */
#ifndef KVFS_NIXL_SHAPE_H
#define KVFS_NIXL_SHAPE_H

#include <filesystem>
#include <string>
#include <vector>

/* Empty: a plugin in one of these directories has the virtual functions of abi.h, slot by slot. Else how they differ, or why nobody can tell.
 * Plugins are read as files, none is loaded. The order of fields of structures is not told by this. */
std::string differs(const std::vector<std::filesystem::path> &directories);

#endif
