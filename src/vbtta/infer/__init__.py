"""The inference: functions of arrays, one model a file."""
