"""Devices: what the runner and the executor ask of the machine they compute on."""
