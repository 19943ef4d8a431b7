"""A folder of thirty notebooks, some broken, hanging or cheating, is graded within five minutes on two cores."""
