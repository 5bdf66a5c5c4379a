"""The cooperative game against its definition."""
