"""Memory and traffic of each stage, measured from outside."""
