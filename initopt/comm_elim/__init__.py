"""Meetings of ranks that a start-up does not need: left out, with one agreement in their place."""
