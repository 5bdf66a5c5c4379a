"""Memory and time of a run on GPUs one does not have yet: exact counts where there are some, stated assumptions elsewhere."""
