/* The names in memory, as the data plane's own threads use them. Not installed. */
#ifndef KVFS_NAMES_INTERNAL_H
#define KVFS_NAMES_INTERNAL_H

#include "base/base.h"
#include "kvfs_names.h"

#endif
