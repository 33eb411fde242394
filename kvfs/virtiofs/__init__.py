"""Guests: the sockets of exports, what hypervisors must be told, and the process that keeps a guest over a restart."""
