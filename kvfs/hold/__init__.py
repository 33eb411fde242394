"""A process that keeps mounts over restarts of their daemons: its protocol, the process, and the daemon's side."""
