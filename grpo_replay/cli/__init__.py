"""The command line: options (`app`), one module per subcommand, screens, errors to exit codes.

Imports everything except `api`; heavy libraries only when a command needs them.
"""
