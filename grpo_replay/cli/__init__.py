"""One module per subcommand: check the options, call the package, print the result.

Imports everything except `cli`; heavy libraries only when a command needs them.
"""
