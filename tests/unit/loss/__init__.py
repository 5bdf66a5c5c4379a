"""Token losses and their sums against closed forms."""
