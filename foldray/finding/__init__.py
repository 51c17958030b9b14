"""Schedules that are found when the times of ops are known: lags of named lists, whole lists, and a bound that no list beats."""

from foldray.finding.bound import lower_bound, recorded_bound
from foldray.finding.found import Found, blocks_left, find, first_list
from foldray.finding.lags import best_overlaps, settle
from foldray.finding.problem import Problem
