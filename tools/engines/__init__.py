"""Real engines on this machine: environments for many versions of each, and which of them kvfs works with."""
