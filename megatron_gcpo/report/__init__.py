"""One self-contained HTML page about one or several runs: curves, and every rollout of sampled groups."""
