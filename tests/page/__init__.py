"""The page that shows a dump, in a browser."""
