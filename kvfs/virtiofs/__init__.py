"""Guests: the sockets of exports, the settings of hypervisors, and the process that keeps a guest over a restart."""
