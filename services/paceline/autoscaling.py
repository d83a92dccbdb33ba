"""Serve autoscaling policies for targets and drafts; imported by Serve's controller."""
