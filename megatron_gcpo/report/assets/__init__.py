"""Files that become parts of the page."""
