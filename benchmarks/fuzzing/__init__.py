"""Fuzz targets: functions that take any bytes and raise only on a defect."""
