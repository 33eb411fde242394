"""The ways in: the pyfuse3 session, mounting, the control socket."""
