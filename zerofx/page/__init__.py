"""The page that shows a dump: one HTML file, which needs neither a network nor a server.

Stands on files alone. Modules: build; beside it lie the parts of the page: HTML, CSS, JavaScript.
"""
