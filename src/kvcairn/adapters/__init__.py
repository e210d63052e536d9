"""Engines that kvcairn serves. Each adapter imports its engine by itself; importing this package imports none."""
