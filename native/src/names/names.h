/* What the data plane's own threads ask of the names. Not installed. */
#ifndef KVFS_NAMES_INTERNAL_H
#define KVFS_NAMES_INTERNAL_H

#include "base/base.h"
#include "kvfs_names.h"

#endif
