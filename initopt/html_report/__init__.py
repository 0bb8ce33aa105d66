"""One start-up as one HTML file: what the other views know, on a page that needs no network and no other file."""
