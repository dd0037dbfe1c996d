"""Passes that users bring: by option, by registration, from installed packages."""
