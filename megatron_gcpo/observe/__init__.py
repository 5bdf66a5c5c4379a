"""What a run leaves behind: metrics, timers, rollouts, progress."""
