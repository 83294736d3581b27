"""What people see whatever the command: quiet libraries, progress, bars, plot style.

Imports errors alone.
"""
