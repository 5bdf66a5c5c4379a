"""Processes: the platform they run on, their place in the rank grid, their deadlines, and how they are started."""
