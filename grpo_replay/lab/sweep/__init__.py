"""A sweep: a grid of recipes and seeds, run as processes of this machine or jobs of a cluster.

Imports the core, and no other folder of the laboratory.
"""
