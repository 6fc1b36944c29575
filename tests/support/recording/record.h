/* What the stand-ins for drivers keep of launches: lines of text. */
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct kernel {
  char *name;
  uint32_t *sizes; /* of the parameters, behind their number */
};

static char *record;
static size_t used, room;
static int recording = 1;

const char *recorded(void) { return used ? record : ""; }
void forget(int record_from_now) {
  used = 0;
  recording = record_from_now;
}

static void note(const char *format, ...) {
  if (used + 1024 > room) {
    room = 2 * room + 4096;
    record = realloc(record, room);
  }
  va_list values;
  va_start(values, format);
  used += vsnprintf(record + used, 1024, format, values);
  va_end(values);
}
