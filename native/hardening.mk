# What every library of ours is compiled and linked with, so that a fault of ours is an end, not a way in. build_ffi.py has the same for the Python
# module; tests/unit/test_hardening.py reads it from the files that come out. Not with sanitizers, which look closer and want the plain calls.
# Level 3 of FORTIFY needs gcc 12 or clang 9; an older compiler says so in a warning and takes 2.
HARDENING := -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=3 -Wno-error=cpp -fstack-protector-strong -fstack-clash-protection
HARDENING_LINK := -Wl,-z,relro -Wl,-z,now -Wl,-z,noexecstack
