"""CorrectionBench: methods of correction on fixed conditions, beside each other. The exact track lists every
response of small policies, and needs torch alone."""
