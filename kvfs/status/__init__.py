"""A pool's account of itself: the status document, its numbers, and their forms for people and for Prometheus."""
