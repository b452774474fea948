/* One visit to memory per observed tensor. In one file: it is compiled at first use by one call.
 *
 * Each row (a token's channels) is read once; what needs a second look at it (the sum of squares
 * about the row's own mean, the angle to the block's input) finds it in the first-level cache.
 * The file is compiled once for each element type by including itself; hooks/tensor/fused.py calls it,
 * and hooks/tensor/reduce.py is its twin in PyTorch, with equal numbers.
 */
#ifndef ELEMENT
#include <math.h>
#include <stdint.h>
#include <string.h>

#define SEGMENT 2048 /* elements of a row handled at once: 8 KiB of float, half a first-level cache */
#define BINS 4096    /* 64 octaves from 2^-40, 64 bins each: at most 1.6 % wide */
#define FIRST_BIN ((127 - 40) << 6)
#define MAX_THREADS 256

/* Sums are kept in LANES parts: enough independent additions to fill the processor's pipelines,
 * and each part adds so few numbers that float is exact enough within a segment. */
#define LANES 32
#define EACH_LANE(n, ...)                                                                         \
  do {                                                                                            \
    int64_t whole = (n) / LANES * LANES;                                                          \
    for (int64_t block = 0; block < whole; block += LANES)                                        \
      for (int lane = 0; lane < LANES; lane++) {                                                  \
        int64_t i = block + lane;                                                                 \
        __VA_ARGS__                                                                               \
      }                                                                                           \
    for (int64_t i = whole; i < (n); i++) {                                                       \
      int lane = (int)(i - whole);                                                                \
      __VA_ARGS__                                                                                 \
    }                                                                                             \
  } while (0)

/* The order of the fields in dynscope.analysis.sums.SUMS; the largest magnitude stands behind them. */
enum { COUNT, SUM, SQUARES, ABS, ZEROS, NONFINITE, MASSIVE, TOKENS, ANGLE, COSINE, IN_SQUARES, IN_COUNT, CALLS, ABSMAX, FIELDS };

/* A site's row of the tally, and how a flat index into its output becomes channel, token and
 * batch: (index / stride) % length, or -1 where the length is 0. */
typedef struct {
  double *sums, *absmax, *top; /* top: 3 x (value, channel, token, batch), NaN where missing */
  int32_t *histogram;
  int64_t stride[3], length[3];
} Row;

typedef struct {
  double sums[FIELDS];
  double top[3];
  int64_t top_index[3];
  int32_t histogram[BINS];
} Partial;

static inline float from_float(float x) { return x; }
static inline float from_bfloat16(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}

static inline int bin_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  int32_t bin = (int32_t)((bits & 0x7fffffff) >> 17) - FIRST_BIN;
  return bin < 0 ? 0 : bin >= BINS ? BINS - 1 : bin;
}

static inline int is_nonfinite(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return (bits & 0x7f800000) == 0x7f800000;
}

static void keep_top(Partial *p, float x, int64_t index) {
  double magnitude = fabs((double)x);
  if (!(magnitude > fabs(p->top[2]))) return;
  int place = magnitude > fabs(p->top[0]) ? 0 : magnitude > fabs(p->top[1]) ? 1 : 2;
  for (int i = 2; i > place; i--) {
    p->top[i] = p->top[i - 1];
    p->top_index[i] = p->top_index[i - 1];
  }
  p->top[place] = x;
  p->top_index[place] = index;
}

/* A sticky maximum: once NaN, always NaN. */
static inline double largest(double a, double b) { return (a != a || a > b) ? a : b; }

/* The magnitude below which half of the histogram lies, by geometric interpolation in its bin:
 * the same arithmetic as dynscope.analysis.sums.median_of_histogram. */
static double median_of(const int32_t *histogram) {
  double total = 0, below = 0;
  for (int i = 0; i < BINS; i++) total += histogram[i];
  for (int i = 0; i < BINS; i++) {
    double here = histogram[i];
    if (here > 0 && below + here >= total / 2) {
      if (i == 0) return 0;
      double inside = (total / 2 - below) / here;
      double low = ldexp(1 + (i % 64) / 64.0, i / 64 - 40);
      double high = ldexp(1 + (i % 64 + 1) / 64.0, i / 64 - 40);
      return low * pow(high / low, inside);
    }
    below += here;
  }
  return 0;
}

static Partial partials[MAX_THREADS]; /* observe calls are serialized by the caller */

/* Add what the last observe call found to a row; `paired` says whether its angles count there. */
void add_to(const Row *row, int paired) {
  const Partial *found = &partials[0];
  for (int f = 0; f < ABSMAX; f++)
    if (paired || f < TOKENS || f > IN_COUNT) row->sums[f] += found->sums[f];
  *row->absmax = largest(*row->absmax, found->sums[ABSMAX]);
  for (int i = 0; i < BINS; i++) row->histogram[i] += found->histogram[i];
  for (int i = 0; i < 3 && found->top_index[i] >= 0; i++) {
    int place = 0; /* behind all that are at least as large */
    while (place < 3 && fabs(row->top[4 * place]) >= fabs(found->top[i])) place++;
    if (place == 3) break;
    memmove(row->top + 4 * place + 4, row->top + 4 * place, sizeof(double) * 4 * (2 - place));
    double *entry = row->top + 4 * place;
    entry[0] = found->top[i];
    for (int axis = 0; axis < 3; axis++)
      entry[1 + axis] = row->length[axis] ? (double)(found->top_index[i] / row->stride[axis] % row->length[axis]) : -1;
  }
}

#define PASTE(a, b) a##b
#define NAME(a, b) PASTE(a, b)

#define ELEMENT float
#define CONVERT from_float
#define SUFFIX _float32
#include "fused.c"
#undef ELEMENT
#undef CONVERT
#undef SUFFIX

#define ELEMENT uint16_t
#define CONVERT from_bfloat16
#define SUFFIX _bfloat16
#include "fused.c"
#undef ELEMENT
#undef CONVERT
#undef SUFFIX

#ifdef __FLT16_MAX__
static inline float from_half(_Float16 x) { return (float)x; }
#define ELEMENT _Float16
#define CONVERT from_half
#define SUFFIX _float16
#include "fused.c"
#undef ELEMENT
#undef CONVERT
#undef SUFFIX
#endif

#else /* the functions, once for each ELEMENT */

static int64_t NAME(nonfinite, SUFFIX)(const ELEMENT *x, int64_t n) {
  int64_t bad = 0;
  for (int64_t i = 0; i < n; i++) bad += is_nonfinite(CONVERT(x[i]));
  return bad;
}

static void NAME(segment, SUFFIX)(const ELEMENT *x, int64_t n, int64_t index, int64_t stride, Partial *p) {
  float sums[LANES] = {0}, magnitudes[LANES] = {0}, most[LANES] = {0};
  int32_t zeros[LANES] = {0};
  EACH_LANE(n, {
    float v = CONVERT(x[i]);
    float a = fabsf(v);
    sums[lane] += v;
    magnitudes[lane] += a;
    zeros[lane] += v == 0;
    most[lane] = a > most[lane] ? a : most[lane];
  });
  double sum = 0, magnitude = 0;
  float absmax = 0;
  int64_t zero = 0;
  for (int lane = 0; lane < LANES; lane++) {
    sum += sums[lane];
    magnitude += magnitudes[lane];
    absmax = most[lane] > absmax ? most[lane] : absmax;
    zero += zeros[lane];
  }
  int64_t bad = isfinite(magnitude) ? 0 : NAME(nonfinite, SUFFIX)(x, n);
  float mean = (float)(sum / (double)n);
  double squares[LANES] = {0}, about_mean = 0, m = mean;
  EACH_LANE(n, {
    double d = (double)(CONVERT(x[i]) - mean);
    squares[lane] += d * d;
  });
  for (int lane = 0; lane < LANES; lane++) about_mean += squares[lane];
  /* the sum of squares about 0 from the one about a nearby point: exact up to double rounding */
  p->sums[SQUARES] += about_mean + 2 * m * (sum - (double)n * m) + (double)n * m * m;
  p->sums[COUNT] += (double)n;
  p->sums[SUM] += sum;
  p->sums[ABS] += magnitude;
  p->sums[ZEROS] += (double)zero;
  p->sums[NONFINITE] += (double)bad;
  p->sums[ABSMAX] = largest(p->sums[ABSMAX], magnitude != magnitude ? magnitude : absmax);
  if (absmax > fabs(p->top[2]))
    for (int64_t i = 0; i < n; i++) {
      float v = CONVERT(x[i]);
      if (fabsf(v) > fabs(p->top[2]) && !is_nonfinite(v)) keep_top(p, v, index + i);
    }
  for (int64_t i = (stride - index % stride) % stride; i < n; i += stride) {
    float v = CONVERT(x[i]);
    if (bad == 0 || !is_nonfinite(v)) p->histogram[bin_of(v)]++;
  }
}

/* Angle between a row and its reference by 2 arcsin(|u - v| / 2) of the unit vectors, which keeps
 * its accuracy at small angles, where arccos of the cosine loses it. */
static void NAME(angle, SUFFIX)(const ELEMENT *x, const ELEMENT *r, int64_t n, Partial *p) {
  double xs[LANES] = {0}, rs[LANES] = {0}, xx = 0, rr = 0;
  EACH_LANE(n, {
    double a = CONVERT(x[i]), b = CONVERT(r[i]);
    xs[lane] += a * a;
    rs[lane] += b * b;
  });
  for (int lane = 0; lane < LANES; lane++) xx += xs[lane], rr += rs[lane];
  p->sums[IN_SQUARES] += rr;
  if (xx == 0 || rr == 0) return; /* a zero vector has no direction */
  double sx = 1 / sqrt(xx), sr = 1 / sqrt(rr), apart = 0;
  memset(xs, 0, sizeof xs);
  EACH_LANE(n, {
    double d = (double)CONVERT(x[i]) * sx - (double)CONVERT(r[i]) * sr;
    xs[lane] += d * d;
  });
  for (int lane = 0; lane < LANES; lane++) apart += xs[lane];
  double angle = 2 * asin(fmin(1, sqrt(apart) / 2));
  p->sums[TOKENS] += 1;
  p->sums[ANGLE] += angle / M_PI;
  p->sums[COSINE] += cos(angle);
}

/* Find the statistics of x (rows x columns, contiguous) and, where r is given, those of its angle
 * to r row by row; add_to then adds them to a row of the tally. */
void NAME(observe, SUFFIX)(const ELEMENT *x, const ELEMENT *r, int64_t rows, int64_t columns,
                           int64_t stride, int threads) {
  int64_t total = rows * columns;
  int64_t unit = r ? columns : SEGMENT, units = r ? rows : (total + SEGMENT - 1) / SEGMENT;
  if (threads > MAX_THREADS) threads = MAX_THREADS;
  if (total < 32768) threads = 1;
  for (int t = 0; t < threads; t++) {
    memset(&partials[t], 0, sizeof(Partial));
    for (int i = 0; i < 3; i++) partials[t].top_index[i] = -1;
  }
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int t = 0; t < threads; t++)
    for (int64_t u = units * t / threads; u < units * (t + 1) / threads; u++) {
      int64_t stop = (u + 1) * unit < total ? (u + 1) * unit : total;
      for (int64_t start = u * unit; start < stop; start += SEGMENT) {
        int64_t n = stop - start < SEGMENT ? stop - start : SEGMENT;
        NAME(segment, SUFFIX)(x + start, n, start, stride, &partials[t]);
      }
      if (r) NAME(angle, SUFFIX)(x + u * unit, r + u * unit, unit, &partials[t]);
    }
  Partial *all = &partials[0];
  for (int t = 1; t < threads; t++) {
    Partial *p = &partials[t];
    for (int f = 0; f < ABSMAX; f++) all->sums[f] += p->sums[f];
    all->sums[ABSMAX] = largest(all->sums[ABSMAX], p->sums[ABSMAX]);
    for (int i = 0; i < BINS; i++) all->histogram[i] += p->histogram[i];
    for (int i = 0; i < 3; i++)
      if (p->top_index[i] >= 0) keep_top(all, (float)p->top[i], p->top_index[i]);
  }
  if (all->sums[ABSMAX] > 100) {
    double bar = 1000 * median_of(all->histogram);
    int64_t massive = 0;
    if (all->sums[ABSMAX] >= bar)
#pragma omp parallel for num_threads(threads) reduction(+ : massive)
      for (int64_t i = 0; i < total; i++) {
        float a = fabsf(CONVERT(x[i]));
        massive += a > 100 && a >= bar;
      }
    all->sums[MASSIVE] = (double)massive;
  }
  all->sums[CALLS] = 1;
  if (r) all->sums[IN_COUNT] = (double)total;
}

/* Sum of squares, number of non-finite values and largest magnitude of n elements. */
void NAME(squares, SUFFIX)(const ELEMENT *x, int64_t n, int threads, double *out) {
  double squares = 0, absmax = 0;
  int64_t nonfinite = 0;
  if (n < 65536) threads = 1;
#pragma omp parallel for num_threads(threads) reduction(+ : squares, nonfinite) reduction(max : absmax)
  for (int64_t start = 0; start < n; start += SEGMENT) {
    int64_t length = n - start < SEGMENT ? n - start : SEGMENT;
    double sums[LANES] = {0};
    float most[LANES] = {0};
    EACH_LANE(length, {
      float v = CONVERT(x[start + i]);
      float a = fabsf(v);
      sums[lane] += (double)v * (double)v;
      most[lane] = a > most[lane] ? a : most[lane];
    });
    double sum = 0;
    for (int lane = 0; lane < LANES; lane++) {
      sum += sums[lane];
      absmax = most[lane] > absmax ? most[lane] : absmax;
    }
    /* doubles hold the square of every finite float, so the sum tells whether to look */
    if (!isfinite(sum)) nonfinite += NAME(nonfinite, SUFFIX)(x + start, length);
    squares += sum;
  }
  out[0] = squares;
  out[1] = (double)nonfinite;
  out[2] = squares != squares ? squares : absmax; /* squares are NaN only where an element is */
}
#endif
